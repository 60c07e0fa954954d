//! The second argument of the peer kernels, after `Params`. `kernels/peers.cuh` mirrors it.
//!
//! Its size is checked where the program is compiled (`static_assert`), names and order by a test
//! here.

/// The largest number of ranks in a group.
pub(crate) const MOST_RANKS: usize = 8;

/// The value of each word of a slot until data arrives: [`EMPTY_BYTE`] four times.
pub(crate) const EMPTY_WORD: u32 = u32::from_ne_bytes([EMPTY_BYTE; 4]);

/// The byte that slots are filled with at first.
pub(crate) const EMPTY_BYTE: u8 = 0xff;

/// Bytes of the state that a rank keeps between launches, in separate cache lines at the end of its
/// memory.
pub(crate) const STATE_BYTES: usize = 128;

/// One rank's view of the group, for one launch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peers {
    /// The start of this rank's slots in the memory of rank r; 0 for this rank and for r >= ranks.
    pub(crate) send: [u64; MOST_RANKS],
    /// The start of rank r's slots in this rank's memory; 0 as in `send`.
    pub(crate) receive: [u64; MOST_RANKS],
    /// Bytes from the slots of even epochs to the slots of odd epochs.
    pub(crate) set_bytes: u64,
    pub(crate) state: u64,
    /// Address of a word in host memory: the missing rank plus one, or 0 if none is missing.
    pub(crate) report: u64,
    /// Nanoseconds.
    pub(crate) deadline: u64,
    /// The rows of this launch, counted within the call, or within the rows of each owner.
    pub(crate) first_row: u64,
    pub(crate) rows: u64,
    pub(crate) rank: u32,
    /// Whether the next kernel may start as soon as all blocks of this one run: 0 or 1.
    pub(crate) admits_next: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name and words of every field of `struct Peers` in a source text; `parse` reads a line.
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

    /// An empty word is NaN as 16-bit and as f32 values. As an integer it differs from every value
    /// sent, because a NaN that looks like it is sent as another NaN.
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
