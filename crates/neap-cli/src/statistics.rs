//! Medians, spreads and paired ratios: pure functions of numbers. An empty series has no statistics
//! rather than a zero.

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

/// Median, smallest and largest, or nothing for no values.
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

/// The geometric mean, or nothing for no values.
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
    fn the_median_of_an_odd_series_is_a_member_and_of_an_even_one_a_mean() {
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
    fn the_geometric_mean_weighs_factors() {
        assert!((geometric_mean(&[1.0, 4.0, 16.0]).unwrap() - 4.0).abs() < 1e-9);
        assert_eq!(geometric_mean(&[]), None);
    }
}
