//! Filling a large value where it stays.
//!
//! A constructor that returns a large value by value builds it on the caller's stack and copies it. The first
//! `malloc` of a process runs on whatever stack calls it, which may be small, and each page of the copy is a page
//! fault. [`fill_in_place!`](crate::fill_in_place) writes the fields one by one instead.

/// Writes fields of a value behind a raw pointer, and leaves those that are `kept` as they are.
///
/// The lists name every field of the type once: a field that is in neither does not compile. The caller is in an
/// `unsafe` block, and owes that the pointer is valid for writes, and that the kept fields are initialised.
#[macro_export]
macro_rules! fill_in_place {
    ($place:expr => $type:ident<$parameter:ident> { $($field:ident: $value:expr,)* } keeping $($kept:ident),*) => {{
        let place: *mut $type<$parameter> = $place;
        // Never called: it names all fields.
        let _ = |$type { $($field: _,)* $($kept: _,)* }: &$type<$parameter>| ();
        $( (&raw mut (*place).$field).write($value); )*
    }};
}

#[cfg(all(test, not(loom)))]
mod tests {
    use core::mem::MaybeUninit;

    #[derive(PartialEq, Debug)]
    struct Pair<T> {
        first: T,
        second: u32,
    }

    fn fill<T>(place: *mut Pair<T>, first: T) {
        // SAFETY: the place is the test's, whose second field is initialised.
        unsafe { fill_in_place!(place => Pair<T> { first: first, } keeping second) }
    }

    #[test]
    fn kept_fields_keep_their_value() {
        let mut place = MaybeUninit::new(Pair { first: 1_u8, second: 7 });
        fill(place.as_mut_ptr(), 2);
        // SAFETY: initialised above.
        assert_eq!(unsafe { place.assume_init() }, Pair { first: 2, second: 7 });
    }
}
