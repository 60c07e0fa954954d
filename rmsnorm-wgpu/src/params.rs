//! The run-time parameters of programs. The uniform buffer of a program has the ones that its text
//! reads: its declaration is printed, and its bytes are packed, from one list.

use std::collections::HashSet;

use rmsnorm_spec::{Tensor, TensorShape};

/// The binding of the uniform buffer; tensors follow.
pub(crate) const BINDING: u32 = 0;

/// Position of a tensor in its binding, in elements. The strides of a vector are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// First element of row 0 of the dispatch; first byte, for scales that are bytes. If rows are in
    /// groups: of the first row in row 0's group, which may lie before the binding, so index sums
    /// wrap.
    pub(crate) first: u32,
    pub(crate) row_stride: u32,
    pub(crate) group_stride: u32,
}

/// Defines [`Numbers`].
macro_rules! numbers {
    ($($(#[$doc:meta])+ $name:ident: $type:ident,)+) => {
        /// The parameters of a dispatch that belong to no tensor. Absent ones are 0.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub(crate) struct Numbers { $($(#[$doc])+ pub(crate) $name: $type,)+ }

        impl Numbers {
            /// Names, types and bits.
            fn words(&self) -> impl Iterator<Item = (&'static str, &'static str, u32)> {
                [$((stringify!($name), stringify!($type), u32::from_ne_bytes(self.$name.to_ne_bytes()))),+].into_iter()
            }
        }
    };
}

numbers! {
    /// First f32 of the dispatch's row sums in the workspace binding; even.
    row_sums: u32,
    /// Rows of the dispatch.
    rows: u32,
    /// Columns, of a group if there are several.
    cols: u32,
    /// Chunks of the dispatch's rows; the gradients of a chunk are summed sequentially.
    chunks: u32,
    /// Rows of partial sums of each gradient.
    partial_rows: u32,
    /// Added to the variance. Of the clamped L2 norm forward has its square, the least sum.
    eps: f32,
    /// Added to the weight.
    weight_offset: f32,
    /// 1 / cols, rounded, for the columns of a group; turns sums into averages. 1 for L2 norms.
    share: f32,
    /// Partial row of the first chunk: the chunks of earlier dispatches.
    first_chunk: u32,
    /// 1 if the sums are added to partial rows of earlier dispatches, otherwise 0.
    accumulates: u32,
    /// 0, unknown to the compiler. Added to an index, it prevents the compiler from keeping an
    /// earlier load in registers.
    zero: u32,
    /// Rows of a group, if rows are in groups.
    rows_per_group: u32,
    /// Rows of the first group that belong to earlier dispatches.
    first_in_group: u32,
    /// Rows of earlier dispatches; the scales of all rows are bound.
    first_row: u32,
    /// Stride in the scale layout: groups or tiles of a row, or `ld`.
    scales_stride: u32,
    /// Bits of a non-negative f32: shaders compare magnitudes as bits.
    amax_floor: u32,
    /// As `amax_floor`.
    amax_ceiling: u32,
    /// As `scales_stride`, for the transposed matrix.
    scales_columnwise_stride: u32,
    /// Groups of columns; the third dimension of the grid.
    groups: u32,
}

/// All parameters of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Params {
    numbers: Numbers,
    places: [Place; Tensor::COUNT],
}

impl Params {
    /// Without tensors.
    pub(crate) fn new(numbers: Numbers) -> Self {
        Params { numbers, places: [Place::default(); Tensor::COUNT] }
    }

    /// Sets the position of a tensor in its binding.
    pub(crate) const fn place(&mut self, tensor: Tensor, place: Place) {
        self.places[tensor as usize] = place;
        if matches!(tensor, Tensor::Workspace) {
            // The plan counts row sums from the start of the workspace.
            self.numbers.row_sums += place.first;
        }
    }

    /// Names (in two parts), types and bits, in the order of every uniform buffer. The tensors that
    /// have a row stride come first, so that a place is aligned to 8 bytes and may be one load.
    fn words(&self) -> impl Iterator<Item = ([&'static str; 2], &'static str, u32)> {
        let tensors =
            [true, false].map(|strided| Tensor::ALL.into_iter().filter(move |tensor| has_stride(*tensor) == strided));
        let places = tensors.into_iter().flatten().flat_map(|tensor| {
            let place = self.places[tensor as usize];
            [("", place.first), ("_row_stride", place.row_stride), ("_group_stride", place.group_stride)]
                .map(|(of, bits)| ([tensor.name(), of], "u32", bits))
        });
        places.chain(self.numbers.words().map(|(name, of, bits)| ([name, ""], of, bits)))
    }
}

const fn has_stride(tensor: Tensor) -> bool {
    matches!(tensor.shape(), TensorShape::Matrix | TensorShape::Transposed | TensorShape::Cols)
}

/// The uniform buffer of a program: the parameters that its text reads, by their index in
/// [`Params::words`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Uniform(Vec<usize>);

impl Uniform {
    /// What a text reads: every `params.NAME`.
    pub(crate) fn of(text: &str) -> Self {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let names = text.split("params.").skip(1).filter_map(|rest| rest.split(|c| !is_name(c)).next());
        let read: HashSet<&str> = names.collect();
        let all = Params::new(Numbers::default());
        let is_read = |(index, (name, ..)): (usize, ([&str; 2], _, _))| read.contains(&*name.concat()).then_some(index);
        Uniform(all.words().enumerate().filter_map(is_read).collect())
    }

    /// The declaration in WGSL.
    pub(crate) fn declaration(&self) -> String {
        let words: Vec<_> = Params::new(Numbers::default()).words().collect();
        let member = |index: &usize| words.get(*index).map(|([name, of], ty, _)| format!("    {name}{of}: {ty},\n"));
        let members: String = self.0.iter().filter_map(member).collect();
        format!("struct Params {{\n{members}}}\n@group(0) @binding({BINDING}) var<uniform> params: Params;\n")
    }

    /// Bytes; a multiple of 16, as some APIs require.
    pub(crate) const fn size(&self) -> u64 {
        (4 * self.0.len() as u64).next_multiple_of(16)
    }

    /// The contents for these parameters.
    pub(crate) fn pack(&self, params: &Params) -> Vec<u8> {
        let words: Vec<u32> = params.words().map(|(.., bits)| bits).collect();
        let words = self.0.iter().filter_map(|index| words.get(*index));
        let mut bytes: Vec<u8> = words.flat_map(|bits| bits.to_ne_bytes()).collect();
        bytes.resize(self.size() as usize, 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each name has the value of its number or tensor, and row sums move with the workspace.
    #[test]
    fn a_buffer_has_what_its_text_reads() {
        let mut params = Params::new(Numbers { row_sums: 1000, eps: 0.5, cols: 7, ..Numbers::default() });
        for tensor in Tensor::ALL {
            let first = 1 + tensor as u32;
            params.place(tensor, Place { first, row_stride: 100 + first, group_stride: 200 + first });
        }
        let packed = |text: &str| {
            let words = Uniform::of(text).pack(&params);
            words.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().expect("4 bytes"))).collect::<Vec<_>>()
        };
        for tensor in Tensor::ALL {
            let first = 1 + tensor as u32;
            let text = format!("params.{tensor} + params.{tensor}_group_stride * params.{tensor}_row_stride;");
            assert_eq!(packed(&text), [first, 100 + first, 200 + first, 0], "{tensor}");
        }
        let workspace = 1 + Tensor::Workspace as u32;
        assert_eq!(packed("(params.eps, params.row_sums)"), [1000 + workspace, 0.5f32.to_bits(), 0, 0]);
        assert_eq!(packed("params.x params.cols params.mean params.x params.y params.dx")[..5], [1, 5, 11, 7, 7]);
        assert_eq!(Uniform::of("params.x params.cols params.x params.y params.dx params.dy").size(), 32);
    }

    #[test]
    fn a_declaration_names_what_is_packed() {
        let declared = "struct Params {\n    x: u32,\n    x_row_stride: u32,\n    cols: u32,\n    eps: f32,\n}\n\
                        @group(0) @binding(0) var<uniform> params: Params;\n";
        assert_eq!(Uniform::of("params.x_row_stride params.x params.eps params.cols").declaration(), declared);
    }

    #[test]
    fn names_are_unique() {
        let all = Params::new(Numbers::default());
        let names: HashSet<String> = all.words().map(|(name, ..)| name.concat()).collect();
        assert_eq!(names.len(), all.words().count());
    }
}
