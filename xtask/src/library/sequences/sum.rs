//! Sums of multiples of values, and a constant: addresses and contents of registers.

use std::collections::BTreeMap;

/// `constant` plus each value of `terms` times its factor, which is not 0.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sum<A> {
    pub(super) terms: BTreeMap<A, i64>,
    pub(super) constant: i64,
}

impl<A: Ord + Clone> Sum<A> {
    pub(super) fn constant(constant: i64) -> Sum<A> {
        Sum { terms: BTreeMap::new(), constant }
    }

    pub(super) fn of(value: A) -> Sum<A> {
        Sum { terms: BTreeMap::from([(value, 1)]), constant: 0 }
    }

    /// Adds `other` times `factor`.
    pub(super) fn plus(mut self, other: &Sum<A>, factor: i64) -> Sum<A> {
        for (value, times) in &other.terms {
            let sum = self.terms.entry(value.clone()).or_default();
            *sum = sum.wrapping_add(times.wrapping_mul(factor));
        }
        self.terms.retain(|_, times| *times != 0);
        self.constant = self.constant.wrapping_add(other.constant.wrapping_mul(factor));
        self
    }

    /// The sum with another in place of each value.
    pub(super) fn with<B: Ord + Clone>(&self, mut value: impl FnMut(&A) -> Sum<B>) -> Sum<B> {
        let constant = Sum::constant(self.constant);
        self.terms.iter().fold(constant, |sum, (name, times)| sum.plus(&value(name), *times))
    }
}

#[cfg(test)]
mod tests {
    use super::Sum;

    #[test]
    fn equal_terms_come_together_and_vanish() {
        let sum = Sum::of("a").plus(&Sum::of("b"), 8).plus(&Sum::of("a"), -1).plus(&Sum::constant(3), 2);
        assert_eq!(sum, Sum { terms: [("b", 8)].into(), constant: 6 });
        let twice = sum.with(|_| Sum::of("c").plus(&Sum::constant(1), 1));
        assert_eq!(twice, Sum { terms: [("c", 8)].into(), constant: 14 });
    }
}
