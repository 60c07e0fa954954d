//! Replaces names in a text: whole identifiers, or parts of one between underscores, as in
//! `load_TENSOR` and `x_J_K`.

/// Replaces names with their values.
pub(super) fn substitute(text: &str, names: &[(&str, &str)]) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let (word, after) = rest.split_at(rest.find(|c| !is_part(c)).unwrap_or(rest.len()));
        let (between, next) = after.split_at(after.find(is_part).unwrap_or(after.len()));
        for (index, part) in word.split('_').enumerate() {
            let found = names.iter().find(|(name, _)| *name == part);
            replaced.push_str(if index > 0 { "_" } else { "" });
            replaced.push_str(found.map_or(part, |(_, value)| value));
        }
        replaced.push_str(between);
        rest = next;
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_replaced_where_they_stand_alone_or_are_a_part_of_an_identifier() {
        let names = [("TENSOR", "dy"), ("T", "bf16")];
        assert_eq!(substitute("load_TENSOR(TENSOR.x, pair_T) Ta aT 0xT", &names), "load_dy(dy.x, pair_bf16) Ta aT 0xT");
    }
}
