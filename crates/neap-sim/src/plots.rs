//! Figures inside HTML pages: SVG drawn by `plotters`, with title, axes and legend.
//!
//! # Design
//!
//! `plotters` writes colours as attributes, which rules of [`STYLE`] override. So text and axes
//! have the page's colours, in light and in dark. A figure has no background of its own.
//!
//! `plotters` escapes all text. Coordinates are whole pixels.

use core::error::Error;
use core::ops::Range;

use plotters::coord::Shift;
use plotters::coord::combinators::{LogCoord, WithKeyPoints};
use plotters::coord::ranged1d::{AsRangedCoord, DefaultFormatting, KeyPointHint, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Rules for a page with figures. The page defines the colour `--text`.
pub const STYLE: &str = "svg{max-width:100%;height:auto}svg [fill='#000000']{fill:var(--text)}\
    svg [stroke='#000000']{stroke:var(--text)}";

/// The area of a figure.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// A chart with axes of these types.
pub type Chart<'a, 'b, X, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>;
/// The result of drawing.
pub type Drawn = Result<(), Box<dyn Error>>;

/// Font size of names and tick labels. `plotters` divides it by 1.24.
const FONT: f64 = 14.0;
/// Pixels of an average character of this font.
const CHARACTER: i32 = 7;
/// Pixels of a line of text.
const LINE: i32 = 14;
/// Radius of a marker.
const MARKER: i32 = 4;

/// Returns the SVG element that `draw` draws, for a place inside an HTML page.
///
/// # Panics
/// Panics if `draw` fails. Drawing into a string fails only if a range is not finite.
pub fn inline(size: (u32, u32), draw: impl FnOnce(&Area<'_>) -> Drawn) -> String {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    draw(&area).and_then(|()| Ok(area.present()?)).expect("every range of a figure is finite");
    drop(area);
    // HTML knows the namespace.
    svg.replacen(" xmlns=\"http://www.w3.org/2000/svg\"", "", 1)
}

/// A name with its colour.
pub struct LegendEntry<'a> {
    /// The name.
    pub name: &'a str,
    /// The colour.
    pub colour: RGBColor,
}

/// Draws a legend from the top of an area.
///
/// # Errors
/// Fails if the area cannot be drawn to.
pub fn legend<'a>(area: &Area<'_>, entries: impl Iterator<Item = LegendEntry<'a>>) -> Drawn {
    for (at, LegendEntry { name, colour }) in entries.enumerate() {
        let y = LINE + at as i32 * (LINE + 4);
        area.draw(&Rectangle::new([(0, y - 5), (12, y + 5)], colour.filled()))?;
        area.draw(&Text::new(name.to_string(), (18, y - 6), ("sans-serif", FONT)))?;
    }
    Ok(())
}

/// Returns a number as a tick's label: `0.5`, `200`, `20k`, `1.5M`.
pub fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        1e6.. => (value / 1e6, "M"),
        1e3.. => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = format!("{value:.2}");
    format!("{}{unit}", digits.trim_end_matches('0').trim_end_matches('.'))
}

/// Titles of a figure, and the width of its legend.
pub struct Titles<'a> {
    /// Title of the figure.
    pub title: &'a str,
    /// Title of the horizontal axis, with its unit.
    pub x: &'a str,
    /// Title of the vertical axis, with its unit.
    pub y: &'a str,
    /// Pixels for labels of the vertical axis.
    pub labels: u32,
}

/// Draws title, axes and mesh of a chart, with `short` numbers at the horizontal axis.
///
/// # Errors
/// Fails if the area cannot be drawn to.
pub fn chart<'a, 'b, X, Y>(
    area: &'a Area<'b>,
    titles: &Titles<'_>,
    x: X,
    y: Y,
    y_label: &dyn Fn(&f64) -> String,
) -> Result<Chart<'a, 'b, X::CoordDescType, Y::CoordDescType>, Box<dyn Error>>
where
    X: AsRangedCoord<Value = f64, CoordDescType: ValueFormatter<f64>>,
    Y: AsRangedCoord<Value = f64, CoordDescType: ValueFormatter<f64>>,
{
    let mut chart = ChartBuilder::on(area)
        .caption(titles.title, ("sans-serif", 18))
        .margin(8)
        .x_label_area_size(40)
        .y_label_area_size(titles.labels)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(titles.x)
        .y_desc(titles.y)
        .x_label_formatter(&|value| short(*value))
        .y_label_formatter(y_label)
        .label_style(("sans-serif", FONT))
        .axis_desc_style(("sans-serif", FONT))
        .draw()?;
    Ok(chart)
}

/// A linear axis with chosen labels.
pub struct Labelled {
    axis: RangedCoordf64,
    labels: Vec<f64>,
}

impl Labelled {
    /// The axis of a range, with labels at these values.
    pub fn new(range: Range<f64>, labels: Vec<f64>) -> Labelled {
        Labelled { axis: range.into(), labels }
    }
}

impl Ranged for Labelled {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.axis.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.labels.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.axis.range()
    }
}

/// A point with a name.
pub struct Point<'a> {
    /// Name and colour.
    pub entry: LegendEntry<'a>,
    /// The horizontal value.
    pub x: f64,
    /// The vertical value.
    pub y: f64,
}

/// Smallest value of a logarithmic axis. Lower values are drawn here.
const LEAST: f64 = 0.1;
/// Most labels of a logarithmic axis.
const TICKS: usize = 6;

/// Returns a logarithmic axis that begins and ends at a label: 1, 2 or 5 times a power of ten.
fn logarithmic(values: impl Iterator<Item = f64> + Clone) -> WithKeyPoints<LogCoord<f64>> {
    let least = values.clone().fold(f64::MAX, f64::min).max(LEAST);
    let most = values.fold(LEAST, f64::max).max(least);
    // Room for a marker.
    let (low, high) = (least / 1.1, most * 1.1);
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let rungs: Vec<f64> = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|times| times * 10_f64.powi(power))).collect();
    let first = rungs.iter().rposition(|rung| *rung <= low).unwrap_or_default();
    let last = rungs.iter().position(|rung| *rung >= high).unwrap_or(rungs.len() - 1);
    let mut ticks = rungs[first..=last].to_vec();
    let range: Range<f64> = ticks[0]..ticks[ticks.len() - 1];
    if ticks.len() > TICKS {
        ticks.retain(|tick| tick.log10().fract().abs() < 1e-9);
        ticks = ticks.iter().copied().step_by(ticks.len().div_ceil(TICKS)).collect();
    }
    range.log_scale().with_key_points(ticks)
}

/// A rectangle of pixels: left, top, right and bottom.
type Pixels = [i32; 4];

fn overlap(a: &Pixels, b: &Pixels) -> bool {
    a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]
}

/// Returns places for labels of these widths beside their markers, inside `bounds`. No label covers
/// another label or a marker, unless there is no such place.
fn place_labels(markers: &[(i32, i32)], widths: &[i32], bounds: &Pixels) -> Vec<Pixels> {
    let around = |&(x, y): &(i32, i32)| [x - MARKER - 1, y - MARKER - 1, x + MARKER + 1, y + MARKER + 1];
    let taken: Vec<Pixels> = markers.iter().map(around).collect();
    let mut placed: Vec<Pixels> = Vec::new();
    for (&(x, y), &width) in markers.iter().zip(widths) {
        let at = |left: i32, middle: i32| [left, middle - LINE / 2, left + width, middle + LINE / 2];
        let distances = (0..40).map(|step| 8 + step * 6);
        let places = distances.flat_map(|far| {
            let (right, left, centre) = (x + far, x - far - width, x - width / 2);
            let [beside, above, below] = [y, y - far - 4, y + far + 4];
            [
                (right, beside),
                (left, beside),
                (centre, above),
                (centre, below),
                (right, above),
                (right, below),
                (left, above),
                (left, below),
            ]
        });
        let inside = |label: &Pixels| {
            label[0] >= bounds[0] && label[1] >= bounds[1] && label[2] <= bounds[2] && label[3] <= bounds[3]
        };
        let free = |label: &Pixels| !taken.iter().chain(&placed).any(|other| overlap(label, other));
        let found = places.map(|(left, middle)| at(left, middle)).find(|label| inside(label) && free(label));
        placed.push(found.unwrap_or_else(|| at(x + 8, y)));
    }
    placed
}

/// Draws named points on logarithmic axes.
///
/// # Errors
/// Fails if the area cannot be drawn to.
pub fn scatter(area: &Area<'_>, titles: &Titles<'_>, points: &[Point<'_>]) -> Drawn {
    let (x, y) = (points.iter().map(|point| point.x), points.iter().map(|point| point.y));
    let mut chart = chart(area, titles, logarithmic(x), logarithmic(y), &|value| short(*value))?;
    let place = |point: &Point<'_>| (point.x.max(LEAST), point.y.max(LEAST));
    chart.draw_series(points.iter().map(|point| Circle::new(place(point), MARKER, point.entry.colour.filled())))?;
    let plot = chart.plotting_area();
    let origin = area.get_base_pixel();
    let pixel = |(x, y): (i32, i32)| (x - origin.0, y - origin.1);
    let markers: Vec<(i32, i32)> = points.iter().map(|point| pixel(plot.map_coordinate(&place(point)))).collect();
    let widths: Vec<i32> = points.iter().map(|point| point.entry.name.len() as i32 * CHARACTER).collect();
    let (across, down) = plot.get_pixel_range();
    let ((left, top), (right, bottom)) = (pixel((across.start, down.start)), pixel((across.end, down.end)));
    let labels = place_labels(&markers, &widths, &[left, top, right, bottom]);
    for ((point, &marker), label) in points.iter().zip(&markers).zip(&labels) {
        let colour = point.entry.colour;
        let end = (marker.0.clamp(label[0], label[2]), (label[1] + label[3]) / 2);
        if (end.0 - marker.0).abs() + (end.1 - marker.1).abs() > 20 {
            area.draw(&PathElement::new([marker, end], colour.mix(0.5)))?;
        }
        // The text touches the side of the label that is nearer to the marker.
        let (x, side) = if label[2] < marker.0 { (label[2], HPos::Right) } else { (label[0], HPos::Left) };
        let style = ("sans-serif", FONT).into_font().color(&colour).pos(Pos::new(side, VPos::Top));
        area.draw(&Text::new(point.entry.name.to_string(), (x, label[1] + 1), style))?;
    }
    Ok(())
}

/// Draws lines on linear axes. The vertical axis begins at 0.
///
/// # Errors
/// Fails if the area cannot be drawn to.
pub fn lines(area: &Area<'_>, titles: &Titles<'_>, lines: &[(RGBColor, Vec<(f64, f64)>)]) -> Drawn {
    let points = || lines.iter().flat_map(|(_, line)| line);
    let ends = |(start, end): (f64, f64), point: &(f64, f64)| (start.min(point.0), end.max(point.0));
    let (start, end) = points().fold((f64::MAX, 0.0), ends);
    let top = points().fold(0.0, |top: f64, point| top.max(point.1));
    // A range must not be empty.
    let (start, top) = (start.min(end), if top > 0.0 { top * 1.05 } else { 1.0 });
    let mut chart = chart(area, titles, start..end.max(start + 1e-3), 0.0..top, &|value| short(*value))?;
    for (colour, line) in lines {
        chart.draw_series(LineSeries::new(line.iter().copied(), colour))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn labels_of_near_markers_do_not_overlap() {
        let bounds = [60, 30, 330, 280];
        let widths = [35, 35, 56, 56, 35, 35, 42];
        for seed in 0..500 {
            let mut random = Random::new(seed, 0);
            // From one pixel to most of the plot.
            let spread = 1 + (seed % 240) as u32;
            let mut near = |from: i32| from + random.below(spread) as i32;
            let markers: Vec<(i32, i32)> = widths.iter().map(|_| (near(70), near(40))).collect();
            let labels = place_labels(&markers, &widths, &bounds);
            for (at, label) in labels.iter().enumerate() {
                assert!(
                    label[0] >= 60 && label[1] >= 30 && label[2] <= 330 && label[3] <= 280,
                    "seed {seed}: {label:?}"
                );
                assert!(!labels[..at].iter().any(|other| overlap(label, other)), "seed {seed}: {labels:?}");
                let marker = |&(x, y): &(i32, i32)| [x - MARKER, y - MARKER, x + MARKER, y + MARKER];
                assert!(!markers.iter().map(marker).any(|marker| overlap(label, &marker)), "seed {seed}: {labels:?}");
            }
        }
    }

    #[test]
    fn short_numbers_have_two_digits_at_most_behind_the_point() {
        let values = [0.0, 0.05, 2.0, 999.0, 1000.0, 20_000.0, 1_500_000.0];
        assert_eq!(values.map(short), ["0", "0.05", "2", "999", "1k", "20k", "1.5M"]);
    }

    #[test]
    fn logarithmic_axes_hold_all_values_between_their_labels() {
        for values in [vec![0.0], vec![7.0, 7.0], vec![3.0, 4500.0], vec![0.0, 1e12], vec![0.1, 0.2, 90.0]] {
            let axis = logarithmic(values.iter().copied());
            let (range, ticks) = (axis.range(), axis.bold_points());
            assert!((1..=TICKS).contains(&ticks.len()), "{values:?}: {ticks:?}");
            assert!(values.iter().all(|value| range.contains(&value.max(LEAST))), "{values:?}: {range:?}");
            assert!(ticks.iter().all(|tick| (range.start..=range.end).contains(tick)), "{values:?}: {ticks:?}");
        }
    }

    #[test]
    fn names_are_escaped_and_the_namespace_is_left_out() {
        let svg = inline((300, 200), |area| {
            let entry = LegendEntry { name: "a<b>&", colour: RED };
            let titles = Titles { title: "t<i>", x: "pages", y: "takes", labels: 50 };
            scatter(area, &titles, &[Point { entry, x: 0.0, y: 0.0 }])
        });
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(svg.contains("a&lt;b&gt;&amp;") && svg.contains("t&lt;i&gt;") && !svg.contains("http"), "{svg}");
    }
}
