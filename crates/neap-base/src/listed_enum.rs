//! Enums whose variants are listed once: [`listed_enum!`](crate::listed_enum!).

/// Declares an enum without fields, and the constant `ALL` of its variants in the order of their
/// numbers.
///
/// The numbers count from 0. If each variant is followed by `= "name"`, the macro also declares a
/// function `name`. `ALL` and `name` have the visibility of the enum.
#[macro_export]
macro_rules! listed_enum {
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $Enum:ident { $( $(#[$note:meta])* $Variant:ident = $name:literal, )+ }
    ) => {
        $crate::listed_enum! { $(#[$attribute])* $visibility enum $Enum { $( $(#[$note])* $Variant, )+ } }

        impl $Enum {
            /// Returns the name in reports.
            $visibility const fn name(self) -> &'static str {
                [$($name),+][self as usize]
            }
        }
    };
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $Enum:ident { $( $(#[$note:meta])* $Variant:ident, )+ }
    ) => {
        $(#[$attribute])*
        $visibility enum $Enum { $( $(#[$note])* $Variant, )+ }

        impl $Enum {
            /// All variants, in the order of their numbers.
            $visibility const ALL: [$Enum; [$($Enum::$Variant),+].len()] = [$($Enum::$Variant),+];
        }
    };
}

#[cfg(all(test, not(loom)))]
mod tests {
    listed_enum! {
        #[derive(Clone, Copy, PartialEq, Debug)]
        #[repr(u8)]
        enum Colour {
            Red = "red",
            Green = "dark green",
        }
    }

    #[test]
    fn numbers_and_names_follow_the_list() {
        assert_eq!(Colour::ALL, [Colour::Red, Colour::Green]);
        assert_eq!(Colour::ALL.map(|colour| (colour as u8, colour.name())), [(0, "red"), (1, "dark green")]);
    }
}
