//! Enums with named variants. The names are used in ids, in reports and on the command line.

/// Declares an enum, a list of its variants, and their names.
macro_rules! named_enum {
    ($(#[$doc:meta])* enum $type:ident { $($(#[$of_variant:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$doc])*
        pub enum $type {
            $($(#[$of_variant])* $variant,)*
        }

        impl $type {
            /// All variants, in the order of their declaration.
            pub const ALL: [$type; [$($name),*].len()] = [$($type::$variant),*];

            /// The name in ids, in reports and on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$variant => $name,)*
                }
            }

            /// The variant with this [`name`](Self::name), if there is one.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|it| it.name() == name)
            }
        }
    };
}
pub(crate) use named_enum;

/// The name of a value of another enum.
pub(crate) fn name_of<T: Copy + PartialEq>(named: &[(T, &'static str)], value: T) -> &'static str {
    named.iter().find(|(known, _)| *known == value).map_or("?", |(_, name)| name)
}

/// The value with this name.
pub(crate) fn named<T: Copy>(named: &[(T, &str)], name: &str) -> Option<T> {
    named.iter().find(|(_, known)| *known == name).map(|(value, _)| *value)
}
