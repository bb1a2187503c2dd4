//! Fills a large value in place.
//!
//! A constructor that returns a large value builds it on the caller's stack and copies it. A
//! process's first `malloc` runs on its caller's stack, which may be small. Each page of the copy
//! costs a page fault. [`fill_in_place!`](crate::fill_in_place) writes the fields one by one
//! instead.

/// Writes fields of the value behind a raw pointer, and leaves the `kept` fields unchanged.
///
/// The lists name every field of the type once; a missing field does not compile. The caller is in
/// an `unsafe` block. It guarantees that the pointer is valid for writes, and that the kept fields
/// are initialised.
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
        // SAFETY: the place is a local of the test, and its second field is initialised.
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
