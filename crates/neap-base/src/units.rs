//! Page frame numbers and orders.
//!
//! Separate types keep page numbers apart from counts of pages. They have no behaviour beyond
//! conversion.

/// Number of a page of an arena, counted from its base. 32 bits hold 16 TiB of 4 KiB pages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(transparent)]
pub struct Pfn(pub u32);

impl Pfn {
    /// Marks the absence of a page, such as the end of a list.
    pub const NONE: Pfn = Pfn(u32::MAX);

    /// The page `pages` further on.
    #[inline]
    pub const fn plus(self, pages: u32) -> Pfn {
        Pfn(self.0 + pages)
    }

    /// Returns the number as an index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the page, or `None` for [`Pfn::NONE`].
    #[inline]
    pub fn some(self) -> Option<Pfn> {
        (self != Pfn::NONE).then_some(self)
    }
}

/// The size of a block of pages, as a power of two.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(transparent)]
pub struct Order(pub u8);

impl Order {
    /// Pages in a block of this order.
    #[inline]
    pub const fn pages(self) -> u32 {
        1 << self.0
    }

    /// Returns the number as an index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The smallest order that holds `pages` (at least 1).
    #[inline]
    pub const fn holding(pages: u32) -> Order {
        Order(if pages <= 1 { 0 } else { (32 - (pages - 1).leading_zeros()) as u8 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_order_that_holds() {
        let orders: std::vec::Vec<u8> = [1, 2, 3, 4, 5, 8, 9, 1024, 1025].map(|p| Order::holding(p).0).into();
        assert_eq!(orders, [0, 1, 2, 2, 3, 3, 4, 10, 11]);
        assert!((1..2000).all(|p| Order::holding(p).pages() >= p && (p == 1 || Order::holding(p).pages() < 2 * p)));
    }
}
