//! The tensors of a call. Each lies in the middle of a larger buffer, and the suite checks every
//! element of that buffer.
//!
//! A buffer is `canary | offset | row, padding, row, padding, .. row | canary`. Canaries and
//! paddings hold NaN, infinities, huge values and random bits. A kernel that lets an element after
//! a row into a sum, even multiplied by zero, therefore gets a wrong sum. Outputs hold a poison
//! before the call. The call must not change a bit of inputs, canaries and paddings between strided
//! rows. Everything is kept as raw bits, for every dtype.
//!
//! Rows may also be billions of elements apart. Then the host keeps only a padding before and after
//! each row, and uploads the buffer in [parts](Guarded::parts).

use std::ops::Range;
use std::sync::OnceLock;

use rmsnorm_spec::quant::{QuantSpec, e8m0_value};
use rmsnorm_spec::{AnyElement, DType, Element, RowGroups, RowLayout, Rows, Storage, Tensor, bf16, f16};
use sha2::{Digest, Sha256};

use crate::case::Kind;
use crate::finding::{Check, Finding};
use crate::testing::draw;

/// A dense tensor as raw bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bits {
    /// The type of the elements.
    pub storage: Storage,
    /// The bits of each element, zero-extended.
    pub bits: Vec<u32>,
}

impl Bits {
    /// The bits of `elements`.
    pub fn of<E: AnyElement>(elements: &[E]) -> Self {
        Bits { storage: E::STORAGE, bits: elements.iter().map(|element| element.bits()).collect() }
    }

    /// `values` rounded to f32, then to `dtype`.
    pub fn rounded(values: &[f64], dtype: DType) -> Self {
        Bits { storage: dtype.into(), bits: values.iter().map(|&value| encode(value, dtype)).collect() }
    }

    /// The values, exactly.
    pub fn values(&self) -> Vec<f64> {
        self.bits.iter().map(|&bits| decode(bits, self.storage)).collect()
    }

    /// One value.
    pub fn value(&self, index: usize) -> f64 {
        decode(self.bits[index], self.storage)
    }
}

/// The value with these bits.
pub(crate) fn decode(bits: u32, storage: impl Into<Storage>) -> f64 {
    f64::from(decode_f32(bits, storage))
}

/// The same as f32, which represents every value of every storage.
pub(crate) fn decode_f32(bits: u32, storage: impl Into<Storage>) -> f32 {
    match storage.into() {
        Storage::Float(DType::F32) => f32::from_bits(bits),
        Storage::Float(DType::F16) => <f16 as AnyElement>::from_bits(bits).to_f32(),
        Storage::Float(DType::Bf16) => <bf16 as AnyElement>::from_bits(bits).to_f32(),
        Storage::Code(codes) => codes.decode(bits as u8),
        Storage::E8m0 => e8m0_value(bits as u8),
    }
}

/// The bits of a value that `storage` represents exactly.
pub(crate) fn encode(value: f64, storage: impl Into<Storage>) -> u32 {
    encode_f32(value as f32, storage)
}

/// The bits of the nearest value of `storage`. For E8M0, `value` must be a power of two.
pub(crate) fn encode_f32(value: f32, storage: impl Into<Storage>) -> u32 {
    match storage.into() {
        Storage::Float(DType::F32) => value.to_bits(),
        Storage::Float(DType::F16) => <f16 as Element>::from_f32(value).bits(),
        Storage::Float(DType::Bf16) => <bf16 as Element>::from_f32(value).bits(),
        Storage::Code(codes) => u32::from(codes.encode(value)),
        Storage::E8m0 => value.to_bits() >> 23,
    }
}

/// The f32 nearest to `value` among the values of `dtype`.
pub(crate) fn round(value: f32, dtype: DType) -> f32 {
    decode_f32(encode_f32(value, dtype), dtype)
}

/// The content of an output before the call. Two runs with different poisons must give the same
/// bits. If they differ, the backend did not write an element, or its result depends on the old
/// content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// A quiet NaN with a distinctive payload; it propagates through arithmetic.
    Nan,
    /// A huge finite value, for code that drops NaN.
    Huge,
}

impl Poison {
    fn bits(self, storage: impl Into<Storage>) -> u32 {
        patterns(storage.into()).0[self as usize]
    }
}

/// The bits of the poisons; and the sign bit, the bits of an infinity, and the mantissa bit of a
/// quiet NaN, for floats. One below an infinity is the largest finite value.
const fn patterns(storage: Storage) -> ([u32; 2], [u32; 3]) {
    match storage {
        Storage::Float(DType::F32) => ([0x7fc5_a5a5, 0x7149_f2ca], [1 << 31, 0x7f80_0000, 0x0040_0000]),
        Storage::Float(DType::F16) => ([0x7e5a, 0x7b5a], [1 << 15, 0x7c00, 0x0200]),
        Storage::Float(DType::Bf16) => ([0x7fc5, 0x7149], [1 << 15, 0x7f80, 0x0040]),
        Storage::Code(_) => ([0x7f, 0x7a], [0; 3]),
        Storage::E8m0 => ([0xff, 0xf1], [0; 3]),
    }
}

/// Period of the surroundings, in elements. It is a prime, so that each row has different
/// surroundings.
const PERIOD: usize = 8209;

/// The content around a tensor: values that would spoil a result, and random bits, which a stray
/// write changes. They are drawn once per dtype, and once for bytes; each tensor starts at another
/// position.
fn surroundings(seed: u64, tensor: Tensor, storage: Storage) -> impl Iterator<Item = u32> {
    static DRAWN: [OnceLock<Vec<u32>>; DType::ALL.len() + 1] = [const { OnceLock::new() }; DType::ALL.len() + 1];
    let drawn = &DRAWN[storage.float().map_or(DType::ALL.len(), |dtype| dtype as usize)];
    let drawn = drawn.get_or_init(|| (0..PERIOD).map(|i| spoiling(draw(0, Tensor::X, i), storage)).collect());
    let first = draw(seed, tensor, 0) % PERIOD as u64;
    drawn.iter().cycle().skip(first as usize).copied()
}

/// Random bits; three of four floats are NaN, infinite or huge.
fn spoiling(random: u64, storage: Storage) -> u32 {
    let (_, [sign, infinity, quiet]) = patterns(storage);
    let sign = if random >> 40 & 1 == 1 { sign } else { 0 };
    match random >> 41 & 3 {
        0 if quiet > 0 => sign | infinity | quiet | random as u32 & (quiet - 1),
        1 if quiet > 0 => sign | infinity,
        2 if quiet > 0 => sign | (infinity - 1),
        _ => random as u32 & element_mask(storage),
    }
}

/// The position of a tensor in its buffer.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// Elements between rows that the suite checks.
    pub pad: usize,
    /// Further elements between rows, in the middle of the padding, that the suite does not check.
    pub apart: usize,
    /// The groups of the rows, if they are grouped; `apart` is 0 then.
    pub groups: Option<RowGroups>,
    /// Elements between the canary and the first element.
    pub offset: usize,
    /// Whether the view includes the padding after the last row, as a slice of a larger tensor may.
    pub reaches_stride: bool,
}

impl Placement {
    /// Dense and aligned.
    pub const DENSE: Placement = Placement { pad: 0, apart: 0, groups: None, offset: 0, reaches_stride: false };
}

/// How the call may use a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// The elements are written; padding and canaries stay unchanged.
    Write,
    /// As `Write`, but the elements are an input too.
    Overwrite,
    /// The elements may change, and their final content has no meaning.
    Scratch,
}

/// The content of a tensor before the call.
pub enum Fill<'a> {
    /// These dense values.
    Values(&'a [f64]),
    /// One poison everywhere.
    Poison(Poison),
    /// The bits of each element, by its index. Only as many low bits as the dtype has are used.
    Bits(&'a dyn Fn(usize) -> u32),
}

/// A tensor inside its guarded buffer, before and after the call.
pub struct Guarded {
    /// The tensor's name in the call.
    pub name: Tensor,
    /// The type of its elements.
    pub storage: Storage,
    /// How the call may use it.
    pub access: Access,
    /// The rows in `before` and `after`, without the `apart` elements.
    here: RowLayout,
    /// Elements between rows that `before` and `after` leave out.
    apart: usize,
    start: usize,
    /// The whole buffer before the call.
    pub before: Vec<u32>,
    /// The whole buffer after the call; equal to `before` until then.
    pub after: Vec<u32>,
    /// The view that the call gets, as a range of the device's buffer. The misuse tests falsify it.
    pub view: Range<usize>,
    /// The row stride that the call gets. The misuse tests falsify it.
    pub row_stride: Option<usize>,
    /// The groups that the call gets. The misuse tests falsify them.
    pub groups: Option<RowGroups>,
}

/// Length of each canary in bytes.
const CANARY_BYTES: usize = 4096;

impl Guarded {
    /// A tensor of `rows` rows of `cols` elements; a vector is one row.
    pub fn new(
        tensor: (Tensor, impl Into<Storage>, Access),
        shape: (usize, usize),
        place: Placement,
        fill: &Fill<'_>,
        seed: u32,
    ) -> Self {
        let ((name, storage, access), (rows, cols)) = (tensor, shape);
        let storage = storage.into();
        let canary = CANARY_BYTES / storage.size();
        let start = canary + place.offset;
        let row_stride = cols + place.pad + place.apart;
        let layout = |row_stride: usize| {
            let mut given = Rows::strided((), row_stride);
            given.groups = place.groups;
            given.layout(rows, cols)
        };
        let (here, there) = (layout(cols + place.pad), layout(row_stride));
        let view_len = if place.reaches_stride { padded_span(&there, place.groups) } else { there.span() };
        // The buffer has padding after the last row, even if the view ends before it.
        let len = start + padded_span(&here, place.groups) + canary;

        let seed = u64::from(seed) ^ 0xca_a817;
        let mut before: Vec<u32> = surroundings(seed, name, storage).take(len).collect();
        for row in 0..rows {
            let first = start + here.start(row);
            for (col, element) in before[first..first + cols].iter_mut().enumerate() {
                *element = match fill {
                    Fill::Values(values) => encode(values[row * cols + col], storage),
                    Fill::Poison(poison) => poison.bits(storage),
                    Fill::Bits(bits) => bits(row * cols + col) & element_mask(storage),
                };
            }
        }
        let Placement { apart, groups, .. } = place;
        let (after, view) = (before.clone(), start..start + view_len);
        let row_stride = (row_stride > cols).then_some(row_stride);
        Guarded { name, storage, access, here, apart, start, before, after, view, row_stride, groups }
    }

    /// Elements of a row.
    pub(crate) fn cols(&self) -> usize {
        self.here.cols
    }

    /// Length of the device's buffer, in elements.
    pub fn buffer_len(&self) -> usize {
        self.before.len() + self.here.rows.saturating_sub(1) * self.apart
    }

    /// The pieces of `before` that are contiguous on the device, as (index of the first element
    /// there, range here). Either one piece, or one per row with half of the padding on each side.
    pub fn parts(&self) -> Vec<(usize, Range<usize>)> {
        let RowLayout { rows, cols, row_stride, .. } = self.here;
        if self.apart == 0 || rows < 2 {
            return vec![(0, 0..self.before.len())];
        }
        let half = (row_stride - cols) / 2;
        let part = |row: usize| {
            let first = if row == 0 { 0 } else { self.start + row * row_stride - half };
            let next = self.start + (row + 1) * row_stride - half;
            let end = if row + 1 == rows { self.before.len() } else { next };
            (first + row * self.apart, first..end)
        };
        (0..rows).map(part).collect()
    }

    /// The elements after the call, as a dense tensor.
    pub fn result(&self) -> Bits {
        self.elements_of(&self.after)
    }

    /// The elements before the call, as a dense tensor.
    pub(crate) fn given(&self) -> Bits {
        self.elements_of(&self.before)
    }

    fn elements_of(&self, buffer: &[u32]) -> Bits {
        let first = |row: usize| self.start + self.here.start(row);
        let row = |row: usize| first(row)..first(row) + self.here.cols;
        Bits { storage: self.storage, bits: (0..self.here.rows).flat_map(|r| buffer[row(r)].iter().copied()).collect() }
    }

    /// The first element that the call changed but must not change.
    pub fn breach(&self) -> Option<Finding> {
        let changed = |&i: &usize| self.before[i] != self.after[i] && !(self.may_change(i));
        let index = (0..self.before.len()).find(changed)?;
        let (check, place) = self.describe(index);
        let detail = format!("{place} changed from {:#x} to {:#x}", self.before[index], self.after[index]);
        Some(Finding { check, output: self.name.name(), detail })
    }

    /// Whether the whole buffer is unchanged. A refused call must not touch its outputs.
    pub fn is_untouched(&self) -> bool {
        self.before == self.after
    }

    fn may_change(&self, index: usize) -> bool {
        match self.access {
            Access::Read => false,
            Access::Write | Access::Overwrite | Access::Scratch => self.element(index).is_some(),
        }
    }

    /// Row and column of a buffer element, if it belongs to the tensor.
    fn element(&self, index: usize) -> Option<(usize, usize)> {
        let (row, col) = self.nearest(index.checked_sub(self.start)?)?;
        (row < self.here.rows && col < self.here.cols).then_some((row, col))
    }

    /// The last row that starts at or before `distance` (elements after the first row's start), and
    /// the elements from that row's start. `None` if rows have no elements.
    fn nearest(&self, distance: usize) -> Option<(usize, usize)> {
        let RowLayout { row_stride, groups, .. } = self.here;
        let Some(RowGroups { rows, stride }) = groups else {
            return Some((distance.checked_div(row_stride)?, distance % row_stride));
        };
        let within = distance % stride;
        let row = within.checked_div(row_stride)?.min(rows - 1);
        Some((distance / stride * rows + row, within - row * row_stride))
    }

    fn describe(&self, index: usize) -> (Check, String) {
        let end = self.before.len() - CANARY_BYTES / self.storage.size();
        if let Some((row, col)) = self.element(index) {
            (Check::Input, format!("row {row}, col {col} of an input"))
        } else if index < self.start {
            (Check::Canary, format!("the element {} before the first", self.start - index))
        } else if index >= end {
            (Check::Canary, format!("the element {} after the last row", index - end + 1))
        } else {
            let row = self.nearest(index - self.start).map_or(0, |(row, _)| row);
            (Check::Padding, format!("the padding after row {row}"))
        }
    }
}

/// Elements from the first row's start to the end of the last stride, or of the last group (also if
/// it is the only one).
fn padded_span(layout: &RowLayout, groups: Option<RowGroups>) -> usize {
    match groups {
        Some(RowGroups { rows, stride }) => layout.rows.div_ceil(rows) * stride,
        None => layout.rows * layout.row_stride,
    }
}

const fn element_mask(storage: Storage) -> u32 {
    match storage.size() {
        1 => 0xff,
        2 => 0xffff,
        _ => u32::MAX,
    }
}

/// All tensors of one call.
pub struct Call {
    /// Forward or backward. A forward call without y is in place, unless it adds the residual after
    /// the norm.
    pub kind: Kind,
    /// The quantization of the result, if any.
    pub quant: Option<QuantSpec>,
    /// The number of matrices whose sum is x. They lie one after the other with x's row stride.
    pub parts: usize,
    /// The tensors, in any order.
    pub tensors: Vec<Guarded>,
}

impl Call {
    /// The tensor of that name, if the call has one.
    pub fn get(&self, tensor: Tensor) -> Option<&Guarded> {
        self.tensors.iter().find(|guarded| guarded.name == tensor)
    }

    /// The tensor of that name, to falsify or to fill it.
    pub fn get_mut(&mut self, tensor: Tensor) -> Option<&mut Guarded> {
        self.tensors.iter_mut().find(|guarded| guarded.name == tensor)
    }

    /// The first element that the call changed but must not change.
    pub fn breach(&self) -> Option<Finding> {
        self.tensors.iter().find_map(Guarded::breach)
    }

    /// The stored tensors. An in-place call stores y over x, and residual_out over residual.
    pub fn outputs(&self) -> Outputs {
        let stored = |tensor: &Guarded| match tensor.access {
            Access::Read | Access::Scratch => None,
            Access::Overwrite if tensor.name == Tensor::Residual => Some((Tensor::ResidualOut, tensor.result())),
            Access::Overwrite if tensor.name == Tensor::X => Some((Tensor::Y, tensor.result())),
            // The call adds to the tensor, or folds into it.
            Access::Overwrite | Access::Write => Some((tensor.name, tensor.result())),
        };
        Outputs { tensors: self.tensors.iter().filter_map(stored).collect() }
    }
}

/// The stored tensors of a call, each dense.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// In the order of the call's tensors.
    pub tensors: Vec<(Tensor, Bits)>,
}

impl Outputs {
    /// One output, if the call has it.
    pub fn get(&self, tensor: Tensor) -> Option<&Bits> {
        self.tensors.iter().find(|(name, _)| *name == tensor).map(|(_, bits)| bits)
    }

    /// The values of an output, if the call has it.
    pub(crate) fn values(&self, tensor: Tensor) -> Option<Vec<f64>> {
        self.get(tensor).map(Bits::values)
    }

    /// SHA-256 of the bits of the outputs for which `is_fixed` is true, with their names, in
    /// hexadecimal. Equal bits give equal digests on every machine.
    pub fn digest(&self, is_fixed: impl Fn(Tensor) -> bool) -> String {
        let mut digest = Sha256::new();
        for (tensor, bits) in self.tensors.iter().filter(|(tensor, _)| is_fixed(*tensor)) {
            digest.update(tensor.name());
            // The length separates the outputs.
            digest.update((bits.bits.len() as u64).to_le_bytes());
            digest.update(bits.bits.iter().flat_map(|element| element.to_le_bytes()).collect::<Vec<_>>());
        }
        hexadecimal(&digest.finalize())
    }
}

/// SHA-256, in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// Two digits per byte.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The first difference between the outputs of a run from [`Poison::Nan`] and one from
/// [`Poison::Huge`].
pub(crate) fn poison_difference(nan: &Outputs, huge: &Outputs, may_vary: impl Fn(Tensor) -> bool) -> Option<Finding> {
    for ((tensor, a), (_, b)) in nan.tensors.iter().zip(&huge.tensors) {
        let (poison_a, poison_b) = (Poison::Nan.bits(a.storage), Poison::Huge.bits(b.storage));
        for (index, (&a, &b)) in a.bits.iter().zip(&b.bits).enumerate() {
            if (a, b) == (poison_a, poison_b) {
                let detail = format!("element {index} was never written");
                return Some(Finding { check: Check::Unwritten, output: tensor.name(), detail });
            }
            if a != b && !may_vary(*tensor) {
                let detail = format!("element {index} depends on the old content of memory: {a:#x} and {b:#x}");
                return Some(Finding { check: Check::Poison, output: tensor.name(), detail });
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(access: Access) -> Guarded {
        let place = Placement { pad: 2, offset: 3, ..Placement::DENSE };
        Guarded::new((Tensor::Y, DType::F16, access), (3, 5), place, &Fill::Poison(Poison::Nan), 1)
    }

    /// Every element of the device's buffer comes from at most one place, rows start as view and
    /// stride say, and the padding is cut in the middle.
    #[test]
    fn rows_far_apart_are_uploaded_where_the_view_has_them() {
        for (rows, parts) in [(0, 1), (1, 1), (2, 2), (5, 5)] {
            let place = Placement { pad: 8, apart: 1 << 33, offset: 3, ..Placement::DENSE };
            let tensor =
                Guarded::new((Tensor::Y, DType::F16, Access::Write), (rows, 5), place, &Fill::Poison(Poison::Nan), 1);
            assert_eq!(tensor.parts().len(), parts);
            let (stride, mut end_there, mut end_here) = (tensor.row_stride.expect("it is strided"), 0, 0);
            for (row, (there, here)) in tensor.parts().into_iter().enumerate() {
                assert!(there >= end_there && here.start == end_here, "row {row} of {rows}");
                (end_there, end_here) = (there + here.len(), here.end);
                let row_there = tensor.view.start + row * stride;
                let row_here = here.start + (row_there - there);
                assert_eq!(tensor.element(row_here), (rows > 0).then_some((row, 0)));
                assert!(row == 0 || row_here - here.start == 4, "half of the padding goes before the row");
            }
            assert_eq!((end_there, end_here), (tensor.buffer_len(), tensor.before.len()));
            assert_eq!(tensor.view.len(), if rows == 0 { 0 } else { (rows - 1) * stride + 5 });
        }
    }

    /// A kernel that reads outside of its tensor must notice it: a quarter each are NaN, infinities
    /// and huge values.
    #[test]
    fn surroundings_are_values_that_spoil_a_sum() {
        for dtype in DType::ALL {
            let values: Vec<f64> =
                surroundings(7, Tensor::X, dtype.into()).take(4000).map(|bits| decode(bits, dtype)).collect();
            let count = |is: fn(&f64) -> bool| values.iter().filter(|value| is(value)).count();
            for (what, count) in [("NaN", count(|v| v.is_nan())), ("infinity", count(|v| v.is_infinite()))] {
                assert!((900..1200).contains(&count), "{what} in {dtype}: {count}");
            }
            assert!(count(|v| v.is_finite() && v.abs() > 6e4) > 900, "huge in {dtype}");
            assert!(count(|v| *v < 0.0) > 1000 && count(|v| *v > 0.0) > 1000, "signs in {dtype}");
        }
    }

    #[test]
    fn breach_tells_canary_padding_and_input_apart() {
        let start = strided(Access::Write).start;
        for (index, access, check) in [
            (0, Access::Write, Some(Check::Canary)),
            (start - 1, Access::Write, Some(Check::Canary)),
            (start + 4, Access::Write, None),
            (start + 4, Access::Read, Some(Check::Input)),
            (start + 5, Access::Write, Some(Check::Padding)),
            (start + 19, Access::Write, Some(Check::Padding)),
            (start + 21, Access::Write, Some(Check::Canary)),
        ] {
            let mut tensor = strided(access);
            tensor.after[index] ^= 1;
            assert_eq!(tensor.breach().map(|finding| finding.check), check, "{index}");
        }
    }

    /// Every element of grouped rows is found; elements between rows and between groups are
    /// padding.
    #[test]
    fn rows_in_groups_are_watched_all_around() {
        let groups = Some(RowGroups { rows: 3, stride: 30 });
        for (rows, reaches_stride) in [(7, false), (7, true), (6, true), (3, false), (2, true), (0, true)] {
            let place = Placement { pad: 2, groups, offset: 3, reaches_stride, ..Placement::DENSE };
            let tensor = |access| {
                let fill = Fill::Bits(&|index| index as u32);
                Guarded::new((Tensor::Y, DType::F32, access), (rows, 5), place, &fill, 1)
            };
            let first = |row: usize| tensor(Access::Write).start + row / 3 * 30 + row % 3 * 7;
            let elements: Vec<usize> = (0..rows).flat_map(|row| first(row)..first(row) + 5).collect();
            assert_eq!(tensor(Access::Write).result().bits, (0..5 * rows as u32).collect::<Vec<_>>());
            for index in 0..tensor(Access::Write).before.len() {
                let mut changed = tensor(Access::Write);
                changed.after[index] ^= 1;
                assert_eq!(changed.breach().is_none(), elements.contains(&index), "{rows} rows, {index}");
            }
            let last = if rows == 0 { 0 } else { first(rows - 1) + 5 - first(0) };
            assert_eq!(tensor(Access::Read).view.len(), if reaches_stride { rows.div_ceil(3) * 30 } else { last });
        }
        let mut tensor = Guarded::new(
            (Tensor::Y, DType::F32, Access::Write),
            (7, 5),
            Placement { pad: 2, groups, ..Placement::DENSE },
            &Fill::Poison(Poison::Nan),
            1,
        );
        tensor.after[tensor.start + 25] ^= 1;
        let finding = tensor.breach().expect("the gap between groups was changed");
        assert!(finding.detail.starts_with("the padding after row 2 changed"), "{}", finding.detail);
    }

    #[test]
    fn poison_difference_finds_the_unwritten_element() {
        let outputs =
            |last| Outputs { tensors: vec![(Tensor::Rstd, Bits { storage: DType::F32.into(), bits: vec![7, last] })] };
        let never = |_| false;
        assert!(poison_difference(&outputs(8), &outputs(8), never).is_none());
        let finding = poison_difference(&outputs(8), &outputs(9), never).expect("they differ");
        assert_eq!(finding.check, Check::Poison);
        assert!(poison_difference(&outputs(8), &outputs(9), |_| true).is_none());
        let finding = poison_difference(&outputs(0x7fc5_a5a5), &outputs(0x7149_f2ca), |_| true).expect("unwritten");
        assert_eq!(finding.check, Check::Unwritten);
    }

    /// A NaN and a huge number in every dtype: code that drops one of them lets the other through.
    #[test]
    fn poisons_are_a_nan_and_a_huge_number() {
        for dtype in DType::ALL {
            assert!(decode(Poison::Nan.bits(dtype), dtype).is_nan(), "{dtype}");
            let huge = decode(Poison::Huge.bits(dtype), dtype);
            assert!(huge.is_finite() && huge > 5e4, "{dtype}: {huge:e}");
        }
    }

    /// For every access, elements around the tensor may not change.
    #[test]
    fn nothing_around_a_tensor_may_change() {
        for access in [Access::Read, Access::Write, Access::Overwrite, Access::Scratch] {
            let start = strided(access).start;
            for index in [0, start - 1, start + 5, start + 13, start + 21] {
                let mut tensor = strided(access);
                tensor.after[index] ^= 1;
                assert!(tensor.breach().is_some(), "{access:?}, element {index}");
            }
            let mut tensor = strided(access);
            tensor.after[start] ^= 1;
            assert_eq!(tensor.breach().is_some(), access == Access::Read, "{access:?}");
        }
    }

    #[test]
    fn every_output_is_compared_between_the_poisons() {
        let bits = |values: &[u32]| Bits { storage: DType::F32.into(), bits: values.to_vec() };
        let outputs = |second: u32| Outputs {
            tensors: vec![(Tensor::Y, bits(&[1, 2])), (Tensor::Mean, bits(&[3, second])), (Tensor::Rstd, bits(&[4]))],
        };
        let finding = poison_difference(&outputs(5), &outputs(6), |_| false).expect("they differ");
        assert_eq!((finding.check, finding.output), (Check::Poison, "mean"));
    }
}
