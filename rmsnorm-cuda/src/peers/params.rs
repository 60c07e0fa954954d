//! What the kernel is told of its group: the argument beside `Params`. `kernels/peers.cuh` is its mirror.
//!
//! Its size is checked where the program is compiled (`static_assert`), names and order by a test here.

/// Ranks of a group at the most.
pub(crate) const MOST_RANKS: usize = 8;

/// What a slot holds, in each of its words, until data comes: [`EMPTY_BYTE`] four times.
pub(crate) const EMPTY_WORD: u32 = u32::from_ne_bytes([EMPTY_BYTE; 4]);

/// What the memory of slots is filled with at first.
pub(crate) const EMPTY_BYTE: u8 = 0xff;

/// What a rank keeps from launch to launch, at the end of its memory: in cache lines of its own.
pub(crate) const STATE_BYTES: usize = 128;

/// One rank's part in the group, for one launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peers {
    /// Where this rank's slots begin in the memory of rank r; 0 for itself and for ranks that there are not.
    pub(crate) send: [u64; MOST_RANKS],
    /// Where rank r's begin in the memory of this one; 0 as in `send`.
    pub(crate) receive: [u64; MOST_RANKS],
    /// From the slots of even epochs to those of odd ones.
    pub(crate) set_bytes: u64,
    pub(crate) state: u64,
    /// A word in the memory of the host: a rank that did not come, plus one; 0 while all did.
    pub(crate) report: u64,
    /// Nanoseconds.
    pub(crate) deadline: u64,
    /// Of the call's rows, or of each owner's, those of this launch.
    pub(crate) first_row: u64,
    pub(crate) rows: u64,
    pub(crate) rank: u32,
    /// Padding, so that the size is the same on both sides.
    pub(crate) unused: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name and words of every field of `struct Peers` in a source text; `parse` takes a line apart.
    fn fields<'a>(source: &'a str, parse: fn(&'a str) -> Option<(&'a str, usize)>) -> Vec<(&'a str, usize)> {
        let body = source.split_once("struct Peers {").expect("a struct").1.split_once("\n}").expect("its end").0;
        body.lines().filter_map(|line| parse(line.trim())).collect()
    }

    fn rust_field(line: &str) -> Option<(&str, usize)> {
        let (name, kind) = line.strip_prefix("pub(crate) ")?.strip_suffix(',')?.split_once(": ")?;
        let bytes = match kind {
            "[u64; MOST_RANKS]" => 8 * MOST_RANKS,
            "u64" => 8,
            "u32" => 4,
            _ => panic!("{line}: neither addresses nor a number"),
        };
        Some((name, bytes))
    }

    fn cuda_field(line: &str) -> Option<(&str, usize)> {
        let (kind, name) = line.split_once(';')?.0.rsplit_once(' ')?;
        let bytes = if kind.ends_with('*') || kind == "unsigned long long" { 8 } else { 4 };
        match name.strip_suffix("[MOST_RANKS]") {
            Some(name) => Some((name, bytes * MOST_RANKS)),
            None => Some((name, bytes)),
        }
    }

    #[test]
    fn the_argument_is_the_same_on_both_sides() {
        let rust = fields(include_str!("params.rs"), rust_field);
        assert_eq!(rust, fields(rmsnorm_kernels::PEERS.text, cuda_field));
        assert_eq!(rust.iter().map(|(_, bytes)| bytes).sum::<usize>(), size_of::<Peers>());
    }

    /// As 16 bits, as f32: compared as an integer it equals no other value, and what is sent in its place is NaN, too.
    #[test]
    fn an_empty_word_is_nan_in_every_dtype() {
        use rmsnorm_spec::{bf16, f16};

        assert_eq!(EMPTY_WORD, u32::MAX);
        let half = EMPTY_WORD as u16;
        assert!(f32::from_bits(EMPTY_WORD).is_nan() && f16::from_bits(half).is_nan() && bf16::from_bits(half).is_nan());
        for (text, word) in [("0x7fffffffu", 0x7fff_ffff_u32), ("0x7fff7fffu", 0x7fff_7fff)] {
            assert!(rmsnorm_kernels::PEERS.text.contains(text));
            let half = word as u16;
            assert_ne!(word, EMPTY_WORD);
            assert!(f32::from_bits(word).is_nan());
            assert!(text == "0x7fffffffu" || (f16::from_bits(half).is_nan() && bf16::from_bits(half).is_nan()));
        }
    }
}
