//! Shapes by name: one, such as `4096x1024`, or a list of `shapes.toml`, such as `@h200-forward`.

use std::collections::BTreeMap;

use crate::{BenchError, Shape};

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
}
