//! The plots: time relative to neap by workload, and resident memory after a burst.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::element::DashedPathElement;
use plotters::prelude::*;

/// Colours that readers with any colour vision tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 0, 0),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
];

const SIZE: (u32, u32) = (960, 460);

/// One allocator's bars: a value for each group, `None` where it was not measured.
pub(crate) struct Bars {
    pub(crate) name: String,
    pub(crate) values: Vec<Option<f64>>,
}

/// One allocator's line.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// Drawn dashed, and in the colour of the line of this number.
    pub(crate) dashed: Option<usize>,
}

/// Draws bars from 1 up or down on a logarithmic axis, in groups.
pub(crate) fn bars(path: &Path, title: &str, y: &str, groups: &[&str], series: &[Bars]) -> Result<()> {
    draw_bars(path, title, y, groups, series).map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

fn draw_bars(
    path: &Path,
    title: &str,
    y: &str,
    groups: &[&str],
    series: &[Bars],
) -> Result<(), Box<dyn core::error::Error>> {
    let values = || series.iter().flat_map(|bars| bars.values.iter().flatten());
    let lowest = values().copied().fold(0.5, f64::min);
    let highest = values().copied().fold(2.0, f64::max);
    // Whole powers of two, with room for the legend above.
    let range = lowest.log2().floor().exp2()..(highest.log2().ceil() + 1.0).exp2();
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(-0.5..groups.len() as f64 - 0.5, range.clone().log_scale().base(2.0))?;
    let group = |x: &f64| {
        let near = x.round();
        let found = if (x - near).abs() < 0.01 && near >= 0.0 { groups.get(near as usize) } else { None };
        found.map(ToString::to_string).unwrap_or_default()
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(groups.len() * 2)
        .x_label_formatter(&group)
        .x_desc("workload")
        .y_label_formatter(&|value| format!("{value}"))
        .y_desc(y)
        .label_style(("sans-serif", 15))
        .axis_desc_style(("sans-serif", 16))
        .draw()?;
    let width = 0.8 / series.len() as f64;
    for (at, bars) in series.iter().enumerate() {
        // The first colour is neap's, which is the line at 1.
        let style = COLOURS[(at + 1) % COLOURS.len()].filled();
        let bar = |(group, value): (usize, &Option<f64>)| {
            let left = group as f64 - 0.4 + width * at as f64;
            Some(Rectangle::new([(left, 1.0), (left + width * 0.9, (*value)?)], style))
        };
        let legend = move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], style);
        chart.draw_series(bars.values.iter().enumerate().filter_map(bar))?.label(&bars.name).legend(legend);
    }
    let ends = [(-0.5, 1.0), (groups.len() as f64 - 0.5, 1.0)];
    let style = COLOURS[0].stroke_width(2);
    let legend = move |(x, y)| PathElement::new([(x, y), (x + 14, y)], style);
    chart.draw_series(LineSeries::new(ends, style))?.label("neap (1)").legend(legend);
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.4))
        .label_font(("sans-serif", 14))
        .draw()?;
    area.present()?;
    Ok(())
}

/// Draws lines on linear axes, with the legend beside the plot.
pub(crate) fn lines(path: &Path, title: &str, x: &str, y: &str, series: &[Line]) -> Result<()> {
    draw_lines(path, title, x, y, series).map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

fn draw_lines(path: &Path, title: &str, x: &str, y: &str, series: &[Line]) -> Result<(), Box<dyn core::error::Error>> {
    let points = || series.iter().flat_map(|line| line.points.iter());
    let right = points().map(|point| point.0).fold(0.0, f64::max);
    let top = points().map(|point| point.1).fold(0.0, f64::max);
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(48)
        .y_label_area_size(72)
        // The right part of the plot, without points, holds the legend.
        .build_cartesian_2d(0.0..right * 1.35, 0.0..top * 1.08)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(x)
        .y_desc(y)
        .x_label_formatter(&|value| format!("{value:.1}"))
        .y_label_formatter(&|value| format!("{value:.0}"))
        .label_style(("sans-serif", 15))
        .axis_desc_style(("sans-serif", 16))
        .draw()?;
    for (at, line) in series.iter().enumerate() {
        let colour = COLOURS[line.dashed.unwrap_or(at) % COLOURS.len()];
        let style = colour.stroke_width(if at == 0 { 4 } else { 2 });
        let points = line.points.iter().copied();
        match line.dashed {
            Some(_) => {
                let legend = move |(x, y)| DashedPathElement::new([(x, y), (x + 22, y)], 5, 3, style);
                chart.draw_series(DashedLineSeries::new(points, 7, 4, style))?.label(&line.name).legend(legend);
            }
            None => {
                let legend = move |(x, y)| PathElement::new([(x, y), (x + 22, y)], style);
                chart.draw_series(LineSeries::new(points.clone(), style))?.label(&line.name).legend(legend);
                chart.draw_series(points.map(|point| Circle::new(point, 4, colour.filled())))?;
            }
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .legend_area_size(30)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.4))
        .label_font(("sans-serif", 14))
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn plots_have_title_axes_and_legend() {
        let folder = std::env::temp_dir().join(format!("neap-plots-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let series = [Bars { name: "peer".into(), values: vec![Some(3.0), None] }];
        bars(&folder.join("bars.svg"), "the title", "time (ratio)", &["one", "two"], &series).unwrap();
        let series = [
            Line { name: "neap".into(), points: vec![(0.0, 500.0), (2.0, 9.0)], dashed: None },
            Line { name: "peer".into(), points: vec![(0.0, 500.0), (2.0, 400.0)], dashed: Some(1) },
        ];
        lines(&folder.join("lines.svg"), "the title", "time (s)", "memory (MiB)", &series).unwrap();
        let expected = [
            ("bars.svg", ["the title", "time (ratio)", "one", "two", "peer"]),
            ("lines.svg", ["the title", "time (s)", "memory (MiB)", "neap", "peer"]),
        ];
        for (name, words) in expected {
            let text = fs::read_to_string(folder.join(name)).unwrap();
            assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{name}");
            for word in words {
                assert!(text.contains(word), "{name} lacks {word}");
            }
            assert!(!text.contains("NaN"), "{name}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
