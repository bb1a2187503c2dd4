//! Medians, spreads and paired ratios: pure functions of numbers. For an empty series, functions
//! return `None` instead of zero.

use serde::Serialize;

/// One value and the round it was measured in.
pub(crate) type Measured = (usize, f64);

/// The middle and the spread of a series.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// Returns the median, the smallest and the largest value. `None` without values.
pub(crate) fn summary(values: impl IntoIterator<Item = f64>) -> Option<Summary> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let (min, max) = (*sorted.first()?, *sorted.last()?);
    let middle = sorted.len() / 2;
    let median = if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
    Some(Summary { median, min, max })
}

/// Ratios `ours / theirs` of the rounds in which both were measured. A disturbance of a whole round
/// (another tenant, another clock speed) affects both sides of a pair and cancels.
pub(crate) fn paired_ratios(ours: &[Measured], theirs: &[Measured]) -> Vec<f64> {
    ours.iter()
        .filter_map(|&(round, mine)| {
            let (_, peer) = theirs.iter().find(|(other, _)| *other == round)?;
            (*peer > 0.0).then_some(mine / peer)
        })
        .collect()
}

/// Returns the ends of an interval that contains the median of the distribution with a probability
/// of at least 95 %. It uses only the order of the values, and assumes nothing about the
/// distribution. `None` for fewer than six values.
pub(crate) fn median_interval(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    // Each value is below the median with probability 1/2. `outside` is the probability that the
    // median is below the value at `ends`, or above the value at the same distance from the other
    // end.
    let count = sorted.len();
    let (mut probability, mut outside, mut ends) = (0.5_f64.powi(count as i32), 0.0, 0);
    while ends < count.div_ceil(2) && outside + 2.0 * probability <= 0.05 {
        outside += 2.0 * probability;
        probability *= (count - ends) as f64 / (ends + 1) as f64;
        ends += 1;
    }
    let first = ends.checked_sub(1)?;
    Some((sorted[first], sorted[count - 1 - first]))
}

/// Returns the geometric mean. `None` without values.
pub(crate) fn geometric_mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    Some((values.iter().map(|value| value.ln()).sum::<f64>() / values.len() as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_median_is_middle_value_or_mean_of_two() {
        assert_eq!(summary([9.0, 1.0, 5.0]), Some(Summary { median: 5.0, min: 1.0, max: 9.0 }));
        assert_eq!(summary([9.0, 1.0, 5.0, 6.0]), Some(Summary { median: 5.5, min: 1.0, max: 9.0 }));
        assert_eq!(summary([7.0]), Some(Summary { median: 7.0, min: 7.0, max: 7.0 }));
        assert_eq!(summary([]), None);
    }

    #[test]
    fn only_rounds_with_both_sides_make_a_pair() {
        let ours = [(0, 2.0), (1, 8.0), (3, 5.0)];
        let theirs = [(3, 10.0), (0, 4.0), (2, 1.0)];
        assert_eq!(paired_ratios(&ours, &theirs), [0.5, 0.5]);
        assert!(paired_ratios(&ours, &[(7, 1.0)]).is_empty());
        assert!(paired_ratios(&ours, &[(0, 0.0)]).is_empty());
    }

    #[test]
    fn a_paired_ratio_cancels_what_slows_a_whole_round() {
        let ours = [(0, 1.0), (1, 10.0), (2, 1.1)];
        let theirs = [(0, 2.0), (1, 20.0), (2, 2.2)];
        let ratios = summary(paired_ratios(&ours, &theirs)).unwrap();
        assert!((ratios.min - 0.5).abs() < 1e-9 && (ratios.max - 0.5).abs() < 1e-9);
    }

    #[test]
    fn median_interval_leaves_out_as_many_ends_as_chance_allows() {
        let interval = |count: usize| median_interval((1..=count).rev().map(|value| value as f64));
        // 2 * (1/2)^5 is above 5 %, 2 * (1/2)^6 is not.
        assert_eq!([interval(0), interval(5), interval(6)], [None, None, Some((1.0, 6.0))]);
        // Of 20 values the sixth and fifteenth: 4.1 % are outside.
        assert_eq!([interval(9), interval(20)], [Some((2.0, 8.0)), Some((6.0, 15.0))]);
    }

    #[test]
    fn the_geometric_mean_weighs_factors() {
        assert!((geometric_mean(&[1.0, 4.0, 16.0]).unwrap() - 4.0).abs() < 1e-9);
        assert_eq!(geometric_mean(&[]), None);
    }
}
