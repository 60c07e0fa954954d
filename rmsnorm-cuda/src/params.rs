//! The first argument of every kernel: a struct with the tensors and numbers of its call, passed by
//! value. One table prints the struct for the compiler ([`source`]) and packs its values for a
//! launch ([`Params::pack`]).
//!
//! The phases of a call on column-divided rows have a second argument, [`Columns`], which
//! `kernels/columns.cuh` mirrors. Its size is checked where a program is compiled
//! (`static_assert`), names and order by a test.

use std::ffi::c_void;
use std::fmt::Write as _;
use std::ops::{Index, IndexMut};

use rmsnorm_gpu::program::Accumulate;
use rmsnorm_spec::{Access, Piece, PieceSet, Role, Tensor, TensorSet};

use crate::plan::{ColumnGroups, KernelKey};

/// Where a tensor lies on the device: the address of its first element, and the elements between
/// rows and between groups of rows. Address 0 means absent; a vector has no strides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub(crate) data: u64,
    pub(crate) row_stride: u64,
    pub(crate) group_stride: u64,
}

/// Which programs have a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    All,
    Backward,
    Locks,
    Codes,
    Groups,
    ColumnGroups,
    Parts,
}

/// A number of [`Params`].
struct Number {
    name: &'static str,
    c_type: &'static str,
    of: Of,
    push: fn(&Params, &mut Packed),
}

/// Defines [`Params`] and its numbers. f32 come last, so that the compiler pads none but the end.
macro_rules! params {
    ($($(#[doc = $doc:literal])* $name:ident: $kind:ident as $c_type:literal, $of:ident;)+) => {
        /// The run-time arguments of a call. Its kernels get those that they have code for.
        #[derive(Clone, Copy, Debug, Default)]
        pub(crate) struct Params {
            pub(crate) tensors: [Matrix; Tensor::COUNT],
            $($(#[doc = $doc])* pub(crate) $name: $kind,)+
        }

        const NUMBERS: [Number; [$($c_type),+].len()] = [$(Number {
            name: stringify!($name),
            c_type: $c_type,
            of: Of::$of,
            push: |params, packed| packed.push(params.$name.to_ne_bytes()),
        },)+];
    };
}

params! {
    rows: u64 as "unsigned long long", All;
    cols: u64 as "unsigned long long", All;
    /// Sets of rows whose gradients are summed serially; chunk c has the rows c, c + chunks, ...
    chunks: u64 as "unsigned long long", Backward;
    /// Rows of partial sums: one per chunk, one per group of `Locks`, or a few; none for a split
    /// call.
    partial_rows: u64 as "unsigned long long", Backward;
    /// Mean_wdy and mean_wdy_xhat of every row, for a backward that reads memory twice.
    row_sums: u64 as "float*", Backward;
    /// Spin locks of `GradReduction::Locks`, zeroed before each call.
    locks: u64 as "unsigned*", Locks;
    /// The largest magnitude, and the number of blocks that have contributed.
    found: u64 as "unsigned*", Codes;
    /// Scales between rows or between groups, as the layout requires.
    scales_stride: u64 as "unsigned long long", Codes;
    /// Scales between columns or between groups, as the layout requires.
    scales_columnwise_stride: u64 as "unsigned long long", Codes;
    /// Rows of a group.
    rows_per_group: u64 as "unsigned long long", Groups;
    /// 2^64 / `rows_per_group`, rounded up: a product with it replaces a division.
    group_reciprocal: u64 as "unsigned long long", Groups;
    /// Elements from the workspace of one group of columns to the next.
    workspace_of_group: u64 as "unsigned long long", ColumnGroups;
    /// The number of matrices that x is the sum of.
    parts: u64 as "unsigned long long", Parts;
    /// Elements between parts.
    part_stride: u64 as "unsigned long long", Parts;
    amax_floor: f32 as "float", Codes;
    amax_ceiling: f32 as "float", Codes;
    eps: f32 as "float", All;
    weight_offset: f32 as "float", All;
    /// 1 / cols, rounded: turns sums into averages.
    inv_cols: f32 as "float", All;
}

impl Index<Tensor> for Params {
    type Output = Matrix;

    fn index(&self, tensor: Tensor) -> &Matrix {
        &self.tensors[tensor as usize]
    }
}

impl IndexMut<Tensor> for Params {
    fn index_mut(&mut self, tensor: Tensor) -> &mut Matrix {
        &mut self.tensors[tensor as usize]
    }
}

/// A field of the struct of a kernel.
#[derive(Clone, Copy)]
enum Field {
    Matrix(Tensor),
    Vector(Tensor),
    Number(&'static Number),
}

impl Field {
    const fn name(self) -> &'static str {
        match self {
            Field::Matrix(tensor) | Field::Vector(tensor) => tensor.name(),
            Field::Number(number) => number.name,
        }
    }

    /// The type in C++, for the program of a key.
    fn c_type(self, key: &KernelKey) -> String {
        match self {
            Field::Matrix(tensor) => format!("Matrix<{}>", element(tensor, key)),
            Field::Vector(tensor) => format!("{}*", element(tensor, key)),
            Field::Number(number) => number.c_type.into(),
        }
    }
}

/// The C++ type of a tensor's elements. In a cast, x and dx have the residual stream's.
fn element(tensor: Tensor, key: &KernelKey) -> String {
    let direction = key.program.info().direction;
    let name = match tensor.role(direction) {
        Role::Activation if key.call.form.is_cast() && matches!(tensor, Tensor::X | Tensor::Dx) => "R",
        Role::Activation => "T",
        Role::Weight => "W",
        Role::Gradient => "G",
        Role::Residual => "R",
        Role::F32 => "float",
        Role::Code => "Code",
        Role::Scale => "void",
    };
    let is_read = tensor.access(direction) == Some(Access::Read);
    format!("{}{name}", if is_read { "const " } else { "" })
}

/// The tensors that the program of a key has a field for: those of its direction, without the
/// tensors of pieces and the optional ones that it has no code for.
fn tensors(key: &KernelKey) -> TensorSet {
    let info = key.program.info();
    let all = info.direction.reads().union(info.direction.writes());
    let of = |pieces: PieceSet| {
        pieces.iter().map(|piece| piece.tensors(info.direction)).fold(TensorSet::NONE, TensorSet::union)
    };
    let absent = of(PieceSet::of(&Piece::ALL)).difference(of(key.pieces()));
    all.difference(absent).difference(info.optional.difference(key.call.tensors))
}

/// The fields of the struct of a kernel, in order; or, `is_there` being false, all others.
fn fields(key: &KernelKey, is_there: bool) -> impl Iterator<Item = Field> {
    let (tensors, call, is_backward) = (tensors(key), key.call, key.program.is_backward());
    let tensors = if is_there { tensors } else { TensorSet::of(&Tensor::ALL).difference(tensors) };
    let has = move |number: &Number| match number.of {
        Of::All => true,
        Of::Backward => is_backward,
        Of::Locks => call.accumulate == Accumulate::Locks,
        Of::Codes => call.quant.is_some(),
        Of::Groups => call.has_row_groups,
        Of::ColumnGroups => key.column_groups == ColumnGroups::Blocks,
        Of::Parts => key.pieces().has(Piece::Parts),
    };
    let numbers = NUMBERS.iter().filter(move |number| has(number) == is_there);
    let matrices = tensors.intersection(TensorSet::MATRICES).iter().map(Field::Matrix);
    matrices.chain(tensors.difference(TensorSet::MATRICES).iter().map(Field::Vector)).chain(numbers.map(Field::Number))
}

/// The name of [`source`] in compiler messages.
pub(crate) const FILE: &str = "the kernel's Params";

/// The C++ struct `Params` of a kernel. What its call does not have is a constant of the struct, so
/// that code may name it.
pub(crate) fn source(key: &KernelKey) -> String {
    let mut text = String::from("struct Params {\n");
    for field in fields(key, true) {
        let _ = writeln!(text, "    {} {};", field.c_type(key), field.name());
    }
    for field in fields(key, false) {
        let _ = writeln!(text, "    static constexpr {} {} = {{}};", field.c_type(key), field.name());
    }
    let bytes = Params::default().pack(key).len.next_multiple_of(size_of::<u64>());
    let _ = writeln!(
        text,
        "}};\nstatic_assert(sizeof(Params) == {bytes}, \"rmsnorm-cuda/src/params.rs packs another struct\");"
    );
    text
}

/// The largest struct: every tensor as a matrix, and every number.
const MOST_BYTES: usize = Tensor::COUNT * size_of::<Matrix>() + NUMBERS.len() * size_of::<u64>();

/// The struct of a kernel, as bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    bytes: [u8; MOST_BYTES],
    len: usize,
}

impl Packed {
    /// The address of the struct, for the driver, which only reads it.
    pub(crate) const fn address(&self) -> *mut c_void {
        std::ptr::from_ref(&self.bytes).cast_mut().cast()
    }

    fn push<const N: usize>(&mut self, bytes: [u8; N]) {
        if let Some(to) = self.bytes.get_mut(self.len..).and_then(|rest| rest.first_chunk_mut()) {
            *to = bytes;
        }
        self.len += N;
    }
}

impl Params {
    /// The values of the fields that the kernel of a key has.
    pub(crate) fn pack(&self, key: &KernelKey) -> Packed {
        let mut packed = Packed { bytes: [0; MOST_BYTES], len: 0 };
        for field in fields(key, true) {
            match field {
                Field::Matrix(tensor) => {
                    let Matrix { data, row_stride, group_stride } = self[tensor];
                    packed.push(data.to_ne_bytes());
                    packed.push(row_stride.to_ne_bytes());
                    if key.call.has_row_groups {
                        packed.push(group_stride.to_ne_bytes());
                    }
                }
                Field::Vector(tensor) => packed.push(self[tensor].data.to_ne_bytes()),
                Field::Number(number) => (number.push)(self, &mut packed),
            }
        }
        packed
    }
}

/// The largest number of ranks that the columns of a row can be divided among.
pub(crate) const MOST_COLUMN_RANKS: usize = 64;

/// The second argument of kernels on column-divided rows: the ranks' statistics and column counts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    /// f32 statistics: (rows, numbers), written by the first phase, or (ranks, rows, numbers), read
    /// by the second.
    pub(crate) numbers: u64,
    pub(crate) ranks: u32,
    /// Padding, so that Rust and CUDA agree on the size.
    pub(crate) unused: u32,
    /// The number of columns of each rank.
    pub(crate) columns: [f32; MOST_COLUMN_RANKS],
}

#[cfg(test)]
mod tests {
    use rmsnorm_gpu::program::CallKey;
    use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
    use rmsnorm_spec::{DType, Norm, Problem};

    use super::*;
    use crate::caps::Caps;
    use crate::plan::{Program, plan};

    fn first_key(problem: &Problem) -> KernelKey {
        plan(problem, 16, &Caps::h200()).keys().next().expect("a kernel")
    }

    fn names(source: &str, start: &str) -> String {
        let names = source.lines().filter_map(|line| line.strip_prefix(start)?.strip_suffix(';'));
        names.filter(|line| start.len() > 4 || !line.starts_with("static")).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn a_struct_has_what_its_call_has() {
        let forward = |tensors: &[Tensor]| first_key(&Problem::forward(Norm::Rms, 8192, 4096, DType::Bf16, tensors));
        let plain = source(&forward(&[Tensor::Weight]));
        let expected = "Matrix<const T> x; Matrix<T> y; const W* weight; float* mean; float* rstd; unsigned long long \
                        rows; unsigned long long cols; float eps; float weight_offset; float inv_cols";
        assert_eq!(names(&plain, "    "), expected);
        assert!(
            plain.contains("static constexpr const W* bias = {};") && plain.contains("sizeof(Params) == 88,"),
            "{plain}"
        );
        let sum = source(&forward(&[Tensor::Residual]));
        assert!(
            sum.contains("\n    Matrix<const R> residual;\n") && sum.contains("\n    Matrix<R> residual_out;\n"),
            "{sum}"
        );
        let backward = Problem::backward(Norm::Layer, 8192, 4096, DType::Bf16, &[Tensor::Dbias, Tensor::DresidualOut]);
        let expected = "Matrix<const R> x; Matrix<const T> dy; Matrix<const R> dresidual_out; Matrix<T> dx; const float* \
                        mean; const float* rstd; G* dbias; float* workspace; unsigned long long rows; unsigned long long \
                        cols; unsigned long long chunks; unsigned long long partial_rows; float* row_sums; float eps; \
                        float weight_offset; float inv_cols";
        assert_eq!(names(&source(&first_key(&backward)), "    "), expected);
    }

    /// Every field is in the struct or a constant of it, whatever the key has.
    #[test]
    fn no_struct_lacks_a_name() {
        let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Given);
        let key = first_key(&Problem::quantized_forward(Norm::Rms, 8192, 4096, DType::Bf16, quant, &[Tensor::CodesT]));
        for program in Program::ALL {
            for (has_row_groups, has_parts) in [(false, false), (true, false), (false, true)] {
                let key = KernelKey { program, call: CallKey { has_row_groups, has_parts, ..key.call }, ..key };
                let of = |is_there| fields(&key, is_there).map(Field::name).collect::<Vec<_>>();
                let (there, others) = (of(true), of(false));
                assert_eq!(there.len() + others.len(), Tensor::COUNT + NUMBERS.len(), "{key:?}");
                assert!(there.iter().all(|name| !others.contains(name)), "{key:?}");
            }
        }
    }

    /// The values come in the order of the fields, those of eight bytes first: the compiler pads
    /// none of them.
    #[test]
    fn values_are_packed_as_the_struct_has_them() {
        let mut params = Params { rows: 300, cols: 301, part_stride: 302, parts: 303, eps: 0.5, ..Params::default() };
        (params.rows_per_group, params.group_reciprocal, params.inv_cols) = (304, 305, 0.25);
        for tensor in Tensor::ALL {
            let at = tensor as u64;
            params[tensor] = Matrix { data: at, row_stride: 100 + at, group_stride: 200 + at };
        }
        let key = first_key(&Problem::forward(Norm::Rms, 8192, 4096, DType::Bf16, &[Tensor::Bias]));
        let packed = |has_row_groups, has_parts| {
            let key = KernelKey { call: CallKey { has_row_groups, has_parts, ..key.call }, ..key };
            let Packed { bytes, len } = params.pack(&key);
            let words = bytes[..len - 12].chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
            let floats = bytes[len - 12..len].chunks(4).map(|word| f32::from_ne_bytes(word.try_into().unwrap()));
            assert_eq!(floats.collect::<Vec<_>>(), [0.5, 0.0, 0.25]);
            words.collect::<Vec<_>>()
        };
        let [x, y, bias] = [Tensor::X, Tensor::Y, Tensor::Bias].map(|tensor| tensor as u64);
        let [mean, rstd] = [Tensor::Mean, Tensor::Rstd].map(|tensor| tensor as u64);
        assert_eq!(packed(false, false), [x, 100 + x, y, 100 + y, bias, mean, rstd, 300, 301]);
        let groups = [x, 100 + x, 200 + x, y, 100 + y, 200 + y, bias, mean, rstd, 300, 301, 304, 305];
        assert_eq!(packed(true, false), groups);
        assert_eq!(packed(false, true), [x, 100 + x, y, 100 + y, bias, mean, rstd, 300, 301, 303, 302]);
        assert!(NUMBERS.is_sorted_by_key(|number| number.c_type == "float"));
    }
}
