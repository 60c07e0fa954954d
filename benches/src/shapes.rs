//! Shapes, and lists of them by name: one, such as `4096x1024`, or a list of `shapes.toml`, such as `@h200-forward`.

use std::collections::BTreeMap;
use std::str::FromStr;

use rmsnorm_core::DType;

use crate::BenchError;

/// The largest number of elements of a matrix: no size in bytes overflows with it. The device's own
/// limit is checked later.
pub const MOST_ELEMENTS: usize = isize::MAX as usize >> 8;

/// The size of a matrix. [`FromStr`] reads its [`Display`](std::fmt::Display) form, `4096x1024`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The number of rows.
    pub rows: usize,
    /// The number of elements of a row.
    pub cols: usize,
}

impl Shape {
    /// The number of elements of a matrix.
    pub const fn elements(self) -> usize {
        self.rows * self.cols
    }

    /// The bytes of a matrix.
    pub const fn bytes(self, dtype: DType) -> usize {
        self.elements() * dtype.size()
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Formatted as one string, so that a width pads the whole shape.
        f.pad(&format!("{}x{}", self.rows, self.cols))
    }
}

impl FromStr for Shape {
    type Err = BenchError;

    /// # Errors
    /// If the text is not a shape, or the shape is empty or exceeds the address space.
    fn from_str(text: &str) -> Result<Self, BenchError> {
        let wrong = |why: &str| BenchError::Input(format!("{why}, got {text:?}"));
        let form = || wrong("expected rows x cols as in 4096x1024");
        let (rows, cols) = text.split_once('x').ok_or_else(form)?;
        let number = |text: &str| text.parse::<usize>().map_err(|_| form());
        let shape = Shape { rows: number(rows)?, cols: number(cols)? };
        match shape.rows.checked_mul(shape.cols) {
            Some(1..=MOST_ELEMENTS) => Ok(shape),
            Some(0) => Err(wrong("rows and cols must be at least 1")),
            Some(_) | None => Err(wrong("rows x cols exceed the address space")),
        }
    }
}

/// The shapes that a name stands for, in the order of the list.
///
/// # Errors
/// If the name is neither a shape nor `@` with the name of a list.
pub fn named(name: &str) -> Result<Vec<Shape>, BenchError> {
    let Some(list) = name.strip_prefix('@') else { return Ok(vec![name.parse()?]) };
    let lists = lists()?;
    let known = || lists.keys().map(|name| format!("@{name}")).collect::<Vec<_>>().join(", ");
    let shapes =
        lists.get(list).ok_or_else(|| BenchError::Input(format!("expected one of {}, got {name:?}", known())))?;
    shapes.iter().map(|shape| shape.parse()).collect()
}

fn lists() -> Result<BTreeMap<String, Vec<String>>, BenchError> {
    toml::from_str(include_str!("../shapes.toml")).map_err(|error| BenchError::Input(format!("shapes.toml: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_list_has_shapes_and_none_twice() {
        for list in lists().unwrap().keys() {
            let shapes = named(&format!("@{list}")).unwrap();
            assert!(!shapes.is_empty(), "{list}");
            for (i, shape) in shapes.iter().enumerate() {
                assert!(!shapes[..i].contains(shape), "{list} has {shape} twice");
            }
        }
    }

    #[test]
    fn a_name_is_a_shape_or_a_list() {
        assert_eq!(named("3x5").unwrap(), [Shape { rows: 3, cols: 5 }]);
        assert_eq!(named("@h200-f32").unwrap()[1], Shape { rows: 16384, cols: 4096 });
        let refused = named("@h200-f64").unwrap_err().to_string();
        assert!(refused.contains("@h200-f32, ") && refused.ends_with("got \"@h200-f64\""), "{refused}");
    }

    #[test]
    fn shapes_are_read_back_and_others_refused() {
        let shape = Shape { rows: 10, cols: 3 };
        assert_eq!(shape.to_string().parse::<Shape>().unwrap(), shape);
        for text in
            ["", "4096", "x4", "4x", "4x-1", "2x3x4", "0x3", "3x0", "9223372036854775809x2", "4294967296x4294967295"]
        {
            let refused = text.parse::<Shape>().unwrap_err().to_string();
            assert!(refused.ends_with(&format!(", got {text:?}")), "{refused}");
        }
    }

    #[test]
    fn shape_is_padded_as_a_whole() {
        assert_eq!(format!("{:>8}", Shape { rows: 10, cols: 3 }), "    10x3");
    }
}
