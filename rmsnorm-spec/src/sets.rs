//! Sets of the values of an enum, as bits.

/// Defines a set of the values of an enum that has `ALL` and `name`.
macro_rules! set_of {
    ($(#[$doc:meta])+ $set:ident($bits:ty) of $item:ident) => {
        $(#[$doc])+
        #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub struct $set($bits);

        impl $set {
            /// The empty set; the default, for constants.
            pub const NONE: $set = $set(0);

            /// These values.
            pub const fn of(items: &[$item]) -> Self {
                let (mut set, mut index) = ($set::NONE, 0);
                while index < items.len() {
                    set = set.with(items[index]);
                    index += 1;
                }
                set
            }

            /// Whether the value is in the set.
            pub const fn has(self, item: $item) -> bool {
                self.0 & (1 << item as u8) != 0
            }

            /// The set with the value.
            pub const fn with(self, item: $item) -> Self {
                $set(self.0 | 1 << item as u8)
            }

            /// The set without the value.
            pub const fn without(self, item: $item) -> Self {
                $set(self.0 & !(1 << item as u8))
            }

            /// The set with or without the value.
            pub const fn set(self, item: $item, is_there: bool) -> Self {
                if is_there { self.with(item) } else { self.without(item) }
            }

            /// Whether the set is empty.
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }

            /// The number of values.
            pub const fn len(self) -> usize {
                self.0.count_ones() as usize
            }

            /// The values in both sets.
            pub const fn intersection(self, other: $set) -> Self {
                $set(self.0 & other.0)
            }

            /// The values that `other` lacks.
            pub const fn difference(self, other: $set) -> Self {
                $set(self.0 & !other.0)
            }

            /// The values in either set.
            pub const fn union(self, other: $set) -> Self {
                $set(self.0 | other.0)
            }

            /// The values, in the order of the enum.
            pub fn iter(self) -> impl Iterator<Item = $item> {
                let mut rest = self.0;
                std::iter::from_fn(move || {
                    let lowest = rest.trailing_zeros() as usize;
                    rest &= rest.wrapping_sub(1);
                    $item::ALL.get(lowest).copied()
                })
            }
        }

        impl From<&[$item]> for $set {
            fn from(items: &[$item]) -> Self {
                $set::of(items)
            }
        }

        impl<const N: usize> From<&[$item; N]> for $set {
            fn from(items: &[$item; N]) -> Self {
                $set::of(items)
            }
        }

        impl FromIterator<$item> for $set {
            fn from_iter<I: IntoIterator<Item = $item>>(items: I) -> Self {
                items.into_iter().fold($set::NONE, $set::with)
            }
        }

        impl std::fmt::Debug for $set {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_set().entries(self.iter().map($item::name)).finish()
            }
        }
    };
}
