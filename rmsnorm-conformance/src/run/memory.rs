//! The tensors of a call, each in the middle of a larger buffer whose every other element is watched.
//!
//! A buffer is `canary | offset | row, padding, row, padding, .. row | canary`. Canaries and paddings hold NaN, infinities,
//! huge values and random bits in turn, so that a kernel which lets an element behind a row into a sum, if only times
//! zero, has a wrong sum; outputs hold a poison before the call. Afterwards every bit that the call had no business with
//! must be unchanged: inputs, canaries, and the paddings between strided rows. All of it is kept as raw bits, whatever the
//! dtype.
//!
//! Rows may also be billions of elements apart. What lies between is then left out here, but for a padding at either row,
//! and the buffer is uploaded in [parts](Guarded::parts).

use std::ops::Range;
use std::sync::OnceLock;

use rmsnorm_spec::quant::{QuantSpec, e8m0_value};
use rmsnorm_spec::{DType, Element, RowGroups, RowLayout, Rows, Storage, Stored, Tensor, bf16, f16};
use sha2::{Digest, Sha256};

use crate::case::Kind;
use crate::case::data::draw;
use crate::report::{Check, Finding, hexadecimal};

/// A dense tensor as raw bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bits {
    /// What the elements are.
    pub storage: Storage,
    /// Of each element, zero-extended.
    pub bits: Vec<u32>,
}

impl Bits {
    /// The bits of these elements.
    pub fn of<E: Stored>(elements: &[E]) -> Self {
        Bits { storage: E::STORAGE, bits: elements.iter().map(|element| element.bits()).collect() }
    }

    /// The bits of these values in that dtype, rounded to it by way of f32.
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

/// The same in f32, which holds every value of every storage.
pub(crate) fn decode_f32(bits: u32, storage: impl Into<Storage>) -> f32 {
    match storage.into() {
        Storage::Float(DType::F32) => f32::from_bits(bits),
        Storage::Float(DType::F16) => <f16 as Stored>::from_bits(bits).to_f32(),
        Storage::Float(DType::Bf16) => <bf16 as Stored>::from_bits(bits).to_f32(),
        Storage::Code(codes) => codes.decode(bits as u8),
        Storage::E8m0 => e8m0_value(bits as u8),
    }
}

/// The bits of a value that `storage` holds exactly.
pub(crate) fn encode(value: f64, storage: impl Into<Storage>) -> u32 {
    encode_f32(value as f32, storage)
}

/// The bits of the nearest value that `storage` holds; of a power of two in bytes.
pub(crate) fn encode_f32(value: f32, storage: impl Into<Storage>) -> u32 {
    match storage.into() {
        Storage::Float(DType::F32) => value.to_bits(),
        Storage::Float(DType::F16) => <f16 as Element>::from_f32(value).bits(),
        Storage::Float(DType::Bf16) => <bf16 as Element>::from_f32(value).bits(),
        Storage::Code(codes) => u32::from(codes.encode(value)),
        Storage::E8m0 => value.to_bits() >> 23,
    }
}

/// What an output holds before the call. Two runs with different poisons must end with the same bits: where they do
/// not, the backend wrote nothing, or made its result depend on what was there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// A quiet NaN with a payload of its own, which spreads through arithmetic.
    Nan,
    /// A huge finite value, which passes where NaN is swallowed.
    Huge,
}

impl Poison {
    fn bits(self, storage: impl Into<Storage>) -> u32 {
        match (self, storage.into()) {
            (Poison::Nan, Storage::Float(DType::F32)) => 0x7fc5_a5a5,
            (Poison::Nan, Storage::Float(DType::F16)) => 0x7e5a,
            (Poison::Nan, Storage::Float(DType::Bf16)) => 0x7fc5,
            (Poison::Nan, Storage::Code(_)) => 0x7f,
            (Poison::Nan, Storage::E8m0) => 0xff,
            (Poison::Huge, Storage::Float(DType::F32)) => 0x7149_f2ca,
            (Poison::Huge, Storage::Float(DType::F16)) => 0x7b5a,
            (Poison::Huge, Storage::Float(DType::Bf16)) => 0x7149,
            (Poison::Huge, Storage::Code(_)) => 0x7a,
            (Poison::Huge, Storage::E8m0) => 0xf1,
        }
    }
}

/// Elements until surroundings repeat: a prime, so that rows have others.
const PERIOD: usize = 8209;

/// What surrounds a tensor: values that must not get into it, and random bits, which no write leaves unchanged by chance. They are drawn
/// once for each storage, and begin elsewhere for each tensor.
fn surroundings(seed: u64, tensor: Tensor, storage: Storage) -> impl Iterator<Item = u32> {
    static DRAWN: [OnceLock<Vec<u32>>; 4] = [const { OnceLock::new() }; 4];
    let drawn = match storage {
        Storage::Float(DType::F32) => &DRAWN[0],
        Storage::Float(DType::F16) => &DRAWN[1],
        Storage::Float(DType::Bf16) => &DRAWN[2],
        Storage::Code(_) | Storage::E8m0 => &DRAWN[3],
    };
    let drawn = drawn.get_or_init(|| (0..PERIOD).map(|i| spoiling(draw(0, Tensor::X, i), storage)).collect());
    let first = draw(seed, tensor, 0) % PERIOD as u64;
    drawn.iter().cycle().skip(first as usize).copied()
}

/// Random bits, of which three of four are NaN, infinite or huge.
fn spoiling(random: u64, storage: Storage) -> u32 {
    // Sign, then exponent and mantissa of an infinity; one more mantissa bit makes it a quiet NaN, one less a number.
    let (sign, infinity, quiet) = match storage {
        Storage::Float(DType::F32) => (1 << 31, 0x7f80_0000, 0x0040_0000),
        Storage::Float(DType::F16) => (1 << 15, 0x7c00, 0x0200),
        Storage::Float(DType::Bf16) => (1 << 15, 0x7f80, 0x0040),
        Storage::Code(_) | Storage::E8m0 => return random as u32 & element_mask(storage),
    };
    let sign = if random >> 40 & 1 == 1 { sign } else { 0 };
    match random >> 41 & 3 {
        0 => sign | infinity | quiet | random as u32 & (quiet - 1),
        1 => sign | infinity,
        2 => sign | (infinity - 1),
        _ => random as u32 & element_mask(storage),
    }
}

/// Where a tensor lies in its buffer.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// Unused elements between rows that are watched.
    pub pad: usize,
    /// Unused elements between rows that nobody looks at, in the middle of the padding.
    pub apart: usize,
    /// The groups that the rows lie in, if they do; then nothing is `apart`.
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

/// What the call may do with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing changes.
    Read,
    /// The elements change, nothing between or around them.
    Write,
    /// As `Write`, but the elements are an input too.
    Overwrite,
    /// The elements may change and hold nothing afterwards.
    Scratch,
}

/// What a tensor holds before the call.
pub enum Fill<'a> {
    /// These dense values.
    Values(&'a [f64]),
    /// One poison everywhere.
    Poison(Poison),
    /// These bits, by the index of an element; as many of the lower ones as its dtype has.
    Bits(&'a dyn Fn(usize) -> u32),
}

/// A tensor inside its guarded buffer, before and after the call.
pub struct Guarded {
    /// Which tensor of the call it is.
    pub name: Tensor,
    /// What its elements are.
    pub storage: Storage,
    /// What the call may do with it.
    pub access: Access,
    /// The rows in `before` and `after`, which leave out what is between rows far apart.
    here: RowLayout,
    /// Elements between rows that are left out.
    apart: usize,
    start: usize,
    /// The whole buffer before the call.
    pub before: Vec<u32>,
    /// The whole buffer after the call; the same until one was made.
    pub after: Vec<u32>,
    /// The elements of the device's buffer that the call gets to see. The misuse tests falsify it.
    pub view: Range<usize>,
    /// The stride that the call gets to see. The misuse tests falsify it.
    pub row_stride: Option<usize>,
    /// The groups that the call gets to see. The misuse tests falsify them.
    pub groups: Option<RowGroups>,
}

/// Bytes of canary on either side.
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
        let (name, storage, access) = tensor;
        let storage = storage.into();
        let (rows, cols) = shape;
        let canary = CANARY_BYTES / storage.size();
        let start = canary + place.offset;
        let row_stride = cols + place.pad + place.apart;
        let layout = |row_stride: usize| {
            let given: Rows<()> = match place.groups {
                Some(groups) => Rows::grouped((), row_stride, groups),
                None => Rows::strided((), row_stride),
            };
            given.layout(rows, cols)
        };
        let (here, there) = (layout(cols + place.pad), layout(row_stride));
        let view_len = if place.reaches_stride { padded_span(&there, place.groups) } else { there.span() };
        // The padding after the last row is part of the buffer even where the view ends before it.
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
        let after = before.clone();
        Guarded {
            name,
            storage,
            access,
            here,
            apart: place.apart,
            start,
            before,
            after,
            view: start..start + view_len,
            row_stride: (row_stride > cols).then_some(row_stride),
            groups: place.groups,
        }
    }

    /// Elements of the device's buffer.
    pub fn buffer_len(&self) -> usize {
        self.before.len() + self.here.rows.saturating_sub(1) * self.apart
    }

    /// The pieces of `before` that lie together on the device, each with its first element there: one, or one for each
    /// row with half of the padding on either side.
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

    /// The elements after the call, dense.
    pub fn result(&self) -> Bits {
        self.elements_of(&self.after)
    }

    /// The elements before the call, dense.
    pub(crate) fn given(&self) -> Bits {
        self.elements_of(&self.before)
    }

    fn elements_of(&self, buffer: &[u32]) -> Bits {
        let first = |row: usize| self.start + self.here.start(row);
        let row = |row: usize| first(row)..first(row) + self.here.cols;
        Bits { storage: self.storage, bits: (0..self.here.rows).flat_map(|r| buffer[row(r)].iter().copied()).collect() }
    }

    /// The first place that the call changed and should not have.
    pub fn breach(&self) -> Option<Finding> {
        let changed = |&i: &usize| self.before[i] != self.after[i] && !(self.may_change(i));
        let index = (0..self.before.len()).find(changed)?;
        let (check, place) = self.describe(index);
        let detail = format!("{place} changed from {:#x} to {:#x}", self.before[index], self.after[index]);
        Some(Finding { check, output: self.name.name(), detail })
    }

    /// Whether anything at all changed; a refused call must not have touched its outputs.
    pub fn is_untouched(&self) -> bool {
        self.before == self.after
    }

    fn may_change(&self, index: usize) -> bool {
        match self.access {
            Access::Read => false,
            Access::Write | Access::Overwrite | Access::Scratch => self.element(index).is_some(),
        }
    }

    /// Row and column of an element of the buffer, if it belongs to the tensor.
    fn element(&self, index: usize) -> Option<(usize, usize)> {
        let (row, col) = self.nearest(index.checked_sub(self.start)?)?;
        (row < self.here.rows && col < self.here.cols).then_some((row, col))
    }

    /// The last row that begins so many elements behind the first or before, and the elements from its start; `None` for rows
    /// of no elements.
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

/// Elements from the first row's start to the end of the last stride, or of the last group's, be it the only one.
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
    /// Forward or backward; a forward call without y is in place, unless it adds the residual after the norm.
    pub kind: Kind,
    /// How the result is quantized, where it is.
    pub quant: Option<QuantSpec>,
    /// How many matrices x is the sum of, which lie one behind the other at the distance of their rows.
    pub parts: usize,
    /// In any order.
    pub tensors: Vec<Guarded>,
}

impl Call {
    /// The tensor of that name, if the call has one.
    pub fn get(&self, tensor: Tensor) -> Option<&Guarded> {
        self.tensors.iter().find(|guarded| guarded.name == tensor)
    }

    /// The tensor of that name, to be falsified or filled after the call.
    pub fn get_mut(&mut self, tensor: Tensor) -> Option<&mut Guarded> {
        self.tensors.iter_mut().find(|guarded| guarded.name == tensor)
    }

    /// The first place that the call changed and should not have.
    pub fn breach(&self) -> Option<Finding> {
        self.tensors.iter().find_map(Guarded::breach)
    }

    /// What the call stored. The in-place form stores y over x and residual_out over residual.
    pub fn outputs(&self) -> Outputs {
        let stored = |tensor: &Guarded| match tensor.access {
            Access::Read | Access::Scratch => None,
            Access::Write => Some((tensor.name, tensor.result())),
            Access::Overwrite if tensor.name == Tensor::Residual => Some((Tensor::ResidualOut, tensor.result())),
            Access::Overwrite if tensor.name == Tensor::X => Some((Tensor::Y, tensor.result())),
            // What is added to.
            Access::Overwrite => Some((tensor.name, tensor.result())),
        };
        Outputs { tensors: self.tensors.iter().filter_map(stored).collect() }
    }
}

/// What a call stored, dense.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// In the order of the call.
    pub tensors: Vec<(Tensor, Bits)>,
}

impl Outputs {
    /// One output, if the call has it.
    pub fn get(&self, tensor: Tensor) -> Option<&Bits> {
        self.tensors.iter().find(|(name, _)| *name == tensor).map(|(_, bits)| bits)
    }

    /// The output of that name that later calls stored last, if they have it.
    pub fn last(&self, tensor: Tensor) -> Option<&Bits> {
        self.tensors.iter().rev().find(|(name, _)| *name == tensor).map(|(_, bits)| bits)
    }

    /// SHA-256 of the bits of the outputs that `is_fixed`, with their names, in hexadecimal. Equal bits on every machine
    /// give equal digests.
    pub fn digest(&self, is_fixed: impl Fn(Tensor) -> bool) -> String {
        let mut digest = Sha256::new();
        for (tensor, bits) in self.tensors.iter().filter(|(tensor, _)| is_fixed(*tensor)) {
            digest.update(tensor.name());
            // The length keeps outputs apart.
            digest.update((bits.bits.len() as u64).to_le_bytes());
            digest.update(bits.bits.iter().flat_map(|element| element.to_le_bytes()).collect::<Vec<_>>());
        }
        hexadecimal(&digest.finalize())
    }

    /// The outputs of two calls, one after the other.
    pub fn followed_by(mut self, later: Outputs) -> Outputs {
        self.tensors.extend(later.tensors);
        self
    }
}

/// The first difference between the outputs of a run that started from [`Poison::Nan`] and one from [`Poison::Huge`].
pub(crate) fn poison_difference(nan: &Outputs, huge: &Outputs, may_vary: impl Fn(Tensor) -> bool) -> Option<Finding> {
    for ((tensor, a), (_, b)) in nan.tensors.iter().zip(&huge.tensors) {
        let (poison_a, poison_b) = (Poison::Nan.bits(a.storage), Poison::Huge.bits(b.storage));
        for (index, (&a, &b)) in a.bits.iter().zip(&b.bits).enumerate() {
            if (a, b) == (poison_a, poison_b) {
                let detail = format!("element {index} was never written");
                return Some(Finding { check: Check::Unwritten, output: tensor.name(), detail });
            }
            if a != b && !may_vary(*tensor) {
                let detail = format!("element {index} depends on what was in memory before: {a:#x} and {b:#x}");
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

    /// Every element of the device's buffer comes from one place at most, rows start where the view and the stride say,
    /// and the padding is cut in the middle.
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

    /// What a kernel may not read is worth reading: a quarter each of NaN, infinities and huge values.
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

    /// Of rows in groups every element is found, and what is between rows and between groups is padding.
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

    /// One NaN and one huge number, in every dtype: what swallows the one lets the other through.
    #[test]
    fn poisons_are_a_nan_and_a_huge_number() {
        for dtype in DType::ALL {
            assert!(decode(Poison::Nan.bits(dtype), dtype).is_nan(), "{dtype}");
            let huge = decode(Poison::Huge.bits(dtype), dtype);
            assert!(huge.is_finite() && huge > 5e4, "{dtype}: {huge:e}");
        }
    }

    /// Whatever the access, only elements may change.
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
