//! Tests validation with a table of tensors: every pair in every relative position, every set of
//! optional tensors, and every field of the resulting problem. The backend's views are numbers.
//!
//! The argument structs are written as literals here, so a new tensor breaks the build; the names
//! that they look up are compared with the table, so it must be added there.

mod any;
mod casts;
mod columns;
mod groups;
mod parts;
mod quantized;
mod sharded_rows;
mod sums;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::marker::PhantomData;

use super::*;
use crate::quant::{CodeType, ScaleRounding};
use crate::{
    Access, Activation, AnyElement, AnyQuantizedForward, F8E4M3, F8E5M2, Parts, Piece, RowGroups, Rows, Storage,
    TensorShape, bf16, f16,
};

/// A backend whose views are numbers, with or without f32 gradient sums.
struct Numbers<const SUMS: bool = false>;

/// The place of a tensor of any type.
#[derive(Clone, Copy, Debug)]
struct Place {
    span: Span,
    row_stride: Option<usize>,
    groups: Option<RowGroups>,
}

#[derive(Clone, Copy)]
struct View<E> {
    span: Span,
    element: PhantomData<E>,
}

impl<const SUMS: bool> NormBackend for Numbers<SUMS> {
    type In<'a, E: AnyElement> = View<E>;
    type Out<'a, E: AnyElement> = View<E>;

    fn name(&self) -> &'static str {
        "numbers"
    }
    fn in_span<E: AnyElement>(view: &View<E>) -> Span {
        view.span
    }
    fn out_span<E: AnyElement>(view: &View<E>) -> Span {
        view.span
    }
    fn workspace_len(&self, problem: &Problem) -> usize {
        WORKSPACE * usize::from(problem.tensors.sums_over_rows() > 0)
    }
    fn has_gradient_sums(&self) -> bool {
        SUMS
    }
    fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        match call {
            AnyCall::Forward(_) | AnyCall::Backward(_) => Ok(()),
            AnyCall::QuantizedForward(_)
            | AnyCall::PartialStatistics(_)
            | AnyCall::ForwardWithStatistics(_)
            | AnyCall::PartialBackwardStatistics(_)
            | AnyCall::BackwardWithStatistics(_) => Err(call.unsupported(self.name())),
        }
    }
}

const ROWS: usize = 3;
const COLS: usize = 10;
const WORKSPACE: usize = 17;

/// The direction of a call and its form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Forward,
    InPlace,
    /// The residual is added after the norm, and the sum has a next norm.
    After,
    /// The residual is overwritten after the norm, without a next norm.
    AfterInPlace,
    /// The result is multiplied by a gate.
    Gated,
    Backward,
    /// With a gate after the norm.
    GatedBackward,
    /// Quantized with a given scale.
    Given,
    /// Quantized with scales as bytes.
    Mx,
}

impl Form {
    const ALL: [Form; 9] = [
        Form::Forward,
        Form::InPlace,
        Form::After,
        Form::AfterInPlace,
        Form::Gated,
        Form::Backward,
        Form::GatedBackward,
        Form::Given,
        Form::Mx,
    ];

    const fn placement(self) -> ResidualPlacement {
        match self {
            Form::After | Form::AfterInPlace => ResidualPlacement::After,
            Form::Forward | Form::InPlace | Form::Gated => ResidualPlacement::Before,
            Form::Backward | Form::GatedBackward | Form::Given | Form::Mx => ResidualPlacement::Before,
        }
    }

    fn gate(self) -> Option<Gate> {
        let is_gated = matches!(self, Form::Gated | Form::GatedBackward);
        is_gated.then_some(Gate { activation: Activation::Silu, slot: Slot::After })
    }

    /// Whether the result overwrites x.
    const fn overwrites_x(self) -> bool {
        matches!(self, Form::InPlace)
    }

    const fn overwrites_residual(self) -> bool {
        matches!(self, Form::InPlace | Form::AfterInPlace)
    }

    const fn direction(self) -> Direction {
        match self {
            Form::Forward | Form::InPlace | Form::After | Form::AfterInPlace | Form::Gated => Direction::Forward,
            Form::Backward | Form::GatedBackward => Direction::Backward,
            Form::Given | Form::Mx => Direction::QuantizedForward,
        }
    }

    fn codes(self) -> CodeType {
        self.quant().expect("a quantized form").codes
    }

    const fn quant(self) -> Option<QuantSpec> {
        match self {
            Form::Forward | Form::InPlace | Form::After | Form::AfterInPlace | Form::Gated => None,
            Form::Backward | Form::GatedBackward => None,
            Form::Given => Some(QuantSpec::new(CodeType::E5m2, ScaleKind::Given)),
            Form::Mx => Some(QuantSpec::new(CodeType::E4m3, ScaleKind::Mx { rounding: ScaleRounding::Up })),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Matrix,
    Transposed,
    One,
    OfCols,
    OfRows,
    Workspace,
}

/// The dtype of a tensor within a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Activation,
    Weight,
    Residual,
    F32,
    /// A code, or a byte scale.
    Byte,
}

/// A line of the table.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name: &'static str,
    shape: Shape,
    dtype: Type,
    is_output: bool,
    is_optional: bool,
}

const fn entry(name: &'static str, shape: Shape, dtype: Type, is_output: bool, is_optional: bool) -> Entry {
    Entry { name, shape, dtype, is_output, is_optional }
}

/// Every tensor of a layer norm call.
fn table(form: Form) -> &'static [Entry] {
    use Shape::{Matrix, OfCols, OfRows, One, Transposed, Workspace};
    use Type::{Activation, Byte, F32, Residual, Weight};
    const FORWARD: &[Entry] = &[
        entry("x", Matrix, Activation, false, false),
        entry("weight", OfCols, Weight, false, true),
        entry("bias", OfCols, Weight, false, true),
        entry("residual", Matrix, Residual, false, true),
        entry("residual_out", Matrix, Residual, true, true),
        entry("y", Matrix, Activation, true, false),
        entry("mean", OfRows, F32, true, true),
        entry("rstd", OfRows, F32, true, true),
    ];
    const IN_PLACE: &[Entry] = &[
        entry("x", Matrix, Activation, true, false),
        entry("weight", OfCols, Weight, false, true),
        entry("bias", OfCols, Weight, false, true),
        entry("residual", Matrix, Residual, true, true),
        entry("mean", OfRows, F32, true, true),
        entry("rstd", OfRows, F32, true, true),
    ];
    const AFTER: &[Entry] = &[
        entry("x", Matrix, Activation, false, false),
        entry("weight", OfCols, Weight, false, true),
        entry("bias", OfCols, Weight, false, true),
        entry("residual", Matrix, Residual, false, false),
        entry("residual_out", Matrix, Residual, true, false),
        entry("y", Matrix, Activation, true, false),
        entry("mean", OfRows, F32, true, true),
        entry("rstd", OfRows, F32, true, true),
        entry("next_weight", OfCols, Weight, false, true),
        entry("next_bias", OfCols, Weight, false, true),
        entry("next_mean", OfRows, F32, true, true),
        entry("next_rstd", OfRows, F32, true, true),
    ];
    const AFTER_IN_PLACE: &[Entry] = &[
        entry("x", Matrix, Activation, false, false),
        entry("weight", OfCols, Weight, false, true),
        entry("bias", OfCols, Weight, false, true),
        entry("residual", Matrix, Residual, true, false),
        entry("mean", OfRows, F32, true, true),
        entry("rstd", OfRows, F32, true, true),
    ];
    const GATED: &[Entry] = &[
        entry("x", Matrix, Activation, false, false),
        entry("weight", OfCols, Weight, false, true),
        entry("bias", OfCols, Weight, false, true),
        entry("residual", Matrix, Residual, false, true),
        entry("residual_out", Matrix, Residual, true, true),
        entry("y", Matrix, Activation, true, false),
        entry("mean", OfRows, F32, true, true),
        entry("rstd", OfRows, F32, true, true),
        entry("gate", Matrix, Activation, false, false),
    ];
    const GATED_BACKWARD: &[Entry] = &[
        entry("dy", Matrix, Activation, false, false),
        entry("x", Matrix, Residual, false, false),
        entry("weight", OfCols, Weight, false, true),
        entry("bias", OfCols, Weight, false, true),
        entry("mean", OfRows, F32, false, false),
        entry("rstd", OfRows, F32, false, false),
        entry("dresidual_out", Matrix, Residual, false, true),
        entry("dx", Matrix, Activation, true, false),
        entry("dweight", OfCols, Weight, true, true),
        entry("dbias", OfCols, Weight, true, true),
        entry("workspace", Workspace, F32, true, true),
        entry("dresidual", Matrix, Residual, true, true),
        entry("gate", Matrix, Activation, false, false),
        entry("dgate", Matrix, Activation, true, true),
    ];
    const BACKWARD: &[Entry] = &[
        entry("dy", Matrix, Activation, false, false),
        entry("x", Matrix, Residual, false, false),
        entry("weight", OfCols, Weight, false, true),
        entry("mean", OfRows, F32, false, false),
        entry("rstd", OfRows, F32, false, false),
        entry("dresidual_out", Matrix, Residual, false, true),
        entry("dx", Matrix, Activation, true, false),
        entry("dweight", OfCols, Weight, true, true),
        entry("dbias", OfCols, Weight, true, true),
        entry("workspace", Workspace, F32, true, true),
        entry("dresidual", Matrix, Residual, true, true),
    ];
    const GIVEN: &[Entry] = &[
        entry("x", Matrix, Activation, false, false),
        entry("weight", OfCols, Weight, false, true),
        entry("bias", OfCols, Weight, false, true),
        entry("residual", Matrix, Residual, false, true),
        entry("residual_out", Matrix, Residual, true, true),
        entry("y", Matrix, Activation, true, true),
        entry("mean", OfRows, F32, true, true),
        entry("rstd", OfRows, F32, true, true),
        entry("codes", Matrix, Byte, true, false),
        entry("codes_t", Transposed, Byte, true, true),
        entry("scale", One, F32, false, false),
        entry("amax", One, F32, true, true),
    ];
    // A row has one block of 32 columns.
    const MX: &[Entry] = &[
        entry("x", Matrix, Activation, false, false),
        entry("weight", OfCols, Weight, false, true),
        entry("bias", OfCols, Weight, false, true),
        entry("residual", Matrix, Residual, false, true),
        entry("residual_out", Matrix, Residual, true, true),
        entry("y", Matrix, Activation, true, true),
        entry("mean", OfRows, F32, true, true),
        entry("rstd", OfRows, F32, true, true),
        entry("codes", Matrix, Byte, true, false),
        entry("scales", OfRows, Byte, true, false),
    ];
    match form {
        Form::Forward => FORWARD,
        Form::InPlace => IN_PLACE,
        Form::After => AFTER,
        Form::AfterInPlace => AFTER_IN_PLACE,
        Form::Gated => GATED,
        Form::Backward => BACKWARD,
        Form::GatedBackward => GATED_BACKWARD,
        Form::Given => GIVEN,
        Form::Mx => MX,
    }
}

/// A call: its tensors by name, and the norm.
#[derive(Clone)]
struct Call {
    form: Form,
    spec: NormSpec,
    grad_reduction: GradReduction,
    /// Only in a quantized call.
    quant: Option<QuantSpec>,
    /// Only in a forward call.
    parts: Option<Parts>,
    tensors: Vec<(&'static str, Place)>,
}

/// The dtypes of activations, weight and residual.
type Mix = [DType; 3];

const MIXES: [Mix; 5] = [
    [DType::F32, DType::F32, DType::F32],
    [DType::F16, DType::F16, DType::F16],
    [DType::Bf16, DType::F32, DType::F32],
    [DType::F16, DType::F32, DType::F16],
    [DType::Bf16, DType::Bf16, DType::F32],
];

fn size(entry: &Entry, mix: Mix) -> usize {
    let [activation, weight, residual] = mix;
    match entry.dtype {
        Type::Activation => activation.size(),
        Type::Weight => weight.size(),
        Type::Residual => residual.size(),
        Type::F32 => DType::F32.size(),
        Type::Byte => 1,
    }
}

impl Call {
    /// A layer norm with every tensor, each dense in its own allocation.
    fn full(form: Form) -> Call {
        let place = |(i, entry): (usize, &Entry)| {
            let len = match entry.shape {
                Shape::Matrix | Shape::Transposed => ROWS * COLS,
                Shape::One => 1,
                Shape::OfCols => COLS,
                Shape::OfRows => ROWS,
                Shape::Workspace => WORKSPACE,
            };
            (
                entry.name,
                Place { span: Span { allocation: i as u64 + 1, start: 4096, len }, row_stride: None, groups: None },
            )
        };
        Call {
            form,
            spec: NormSpec {
                residual_placement: form.placement(),
                gate: form.gate(),
                ..NormSpec::layer(ROWS, COLS, 1e-5)
            },
            grad_reduction: GradReduction::Partials,
            quant: form.quant(),
            parts: None,
            tensors: table(form).iter().enumerate().map(place).collect(),
        }
    }

    fn get(&self, name: &str) -> Option<Place> {
        self.tensors.iter().find(|(known, _)| *known == name).map(|(_, place)| *place)
    }

    fn set(&mut self, name: &str, change: impl FnOnce(&mut Place)) {
        let tensor = self.tensors.iter_mut().find(|(known, _)| *known == name);
        change(&mut tensor.expect("the call has that tensor").1);
    }

    fn without(mut self, name: &str) -> Call {
        self.tensors.retain(|(known, _)| *known != name);
        self
    }

    fn check(&self, mix: Mix) -> Result<Validated, Error> {
        match mix {
            [DType::F32, ..] => self.validate::<f32, f32, f32>(),
            [DType::F16, DType::F16, _] => self.validate::<f16, f16, f16>(),
            [DType::F16, DType::F32 | DType::Bf16, _] => self.validate::<f16, f32, f16>(),
            [DType::Bf16, DType::F32 | DType::F16, _] => self.validate::<bf16, f32, f32>(),
            [DType::Bf16, DType::Bf16, _] => self.validate::<bf16, bf16, f32>(),
        }
    }

    fn validate<T: Element, W: Element, R: Element>(&self) -> Result<Validated, Error> {
        let names = RefCell::new(BTreeSet::new());
        let look_up = Names { call: self, names: &names };
        let optional = |name| look_up.find(name).is_some();
        let is_gated = self.form.gate().is_some();
        let checked = match self.form {
            Form::Forward | Form::InPlace | Form::After | Form::AfterInPlace | Form::Gated => {
                let is_next = self.form == Form::After;
                let args = Forward::<'_, Numbers, T, W, R> {
                    x: Some(look_up.source("x", self.form.overwrites_x())),
                    weight: optional("weight").then(|| look_up.view("weight")),
                    bias: optional("bias").then(|| look_up.view("bias")),
                    residual: optional("residual").then(|| look_up.source("residual", self.form.overwrites_residual())),
                    residual_out: look_up.target("residual_out", self.form.overwrites_residual()),
                    y: look_up.target("y", self.form.overwrites_x() || self.form == Form::AfterInPlace),
                    mean: optional("mean").then(|| look_up.view("mean")),
                    rstd: optional("rstd").then(|| look_up.view("rstd")),
                    next_weight: (is_next && optional("next_weight")).then(|| look_up.view("next_weight")),
                    next_bias: (is_next && optional("next_bias")).then(|| look_up.view("next_bias")),
                    next_mean: (is_next && optional("next_mean")).then(|| look_up.view("next_mean")),
                    next_rstd: (is_next && optional("next_rstd")).then(|| look_up.view("next_rstd")),
                    gate: is_gated.then(|| look_up.rows("gate")),
                    parts: self.parts,
                    lost: None,
                    dtypes: DTypes::of::<T, W, R>(),
                };
                self.validated(Checked::forward(self.spec, args.erase())?, Checked::<AnyForward<'_, Numbers>>::visit)
            }
            Form::Given => {
                let args = QuantizedForward::<'_, Numbers, T, F8E5M2, W, R> {
                    codes_t: look_up.optional_rows("codes_t"),
                    scale: Some(look_up.view("scale")),
                    amax: optional("amax").then(|| look_up.view("amax")),
                    ..look_up.quantized(self.quant)
                };
                let checked = Checked::quantized_forward(self.spec, args.erase())?;
                self.validated(checked, Checked::<AnyQuantizedForward<'_, Numbers>>::visit)
            }
            Form::Mx => {
                let args = QuantizedForward::<'_, Numbers, T, F8E4M3, W, R> {
                    scales: Some(Scales::E8m0(look_up.view("scales"))),
                    ..look_up.quantized(self.quant)
                };
                let checked = Checked::quantized_forward(self.spec, args.erase())?;
                self.validated(checked, Checked::<AnyQuantizedForward<'_, Numbers>>::visit)
            }
            Form::Backward | Form::GatedBackward => {
                let args = Backward::<'_, Numbers, T, W, R> {
                    dy: look_up.rows("dy"),
                    x: look_up.rows("x"),
                    weight: optional("weight").then(|| look_up.view("weight")),
                    bias: (is_gated && optional("bias")).then(|| look_up.view("bias")),
                    mean: optional("mean").then(|| look_up.view("mean")),
                    rstd: look_up.view("rstd"),
                    dresidual_out: optional("dresidual_out").then(|| look_up.rows("dresidual_out")),
                    dx: Some(look_up.rows("dx")),
                    dweight: optional("dweight").then(|| look_up.view("dweight")),
                    dbias: optional("dbias").then(|| look_up.view("dbias")),
                    workspace: optional("workspace").then(|| look_up.view("workspace")),
                    dresidual: optional("dresidual").then(|| look_up.rows("dresidual")),
                    dweight_sum: None,
                    dbias_sum: None,
                    gate: is_gated.then(|| look_up.rows("gate")),
                    dgate: (is_gated && optional("dgate")).then(|| look_up.rows("dgate")),
                    accumulate: false,
                    grad_reduction: self.grad_reduction,
                    lost: None,
                    dtypes: DTypes::of::<T, W, R>(),
                };
                let checked = Checked::backward(&Numbers::<false>, self.spec, args.erase())?;
                self.validated(checked, Checked::<AnyBackward<'_, Numbers>>::visit)
            }
        };
        let known: BTreeSet<&str> = table(self.form).iter().map(|entry| entry.name).collect();
        assert_eq!(*names.borrow(), known, "the table has the tensors of the argument struct");
        Ok(checked)
    }

    fn validated<A>(
        &self,
        checked: Checked<A>,
        visit: impl FnOnce(Checked<A>, &mut Visited) -> Result<(), Error>,
    ) -> Validated {
        assert_eq!(checked.spec(), &self.spec);
        let problem = *checked.problem();
        let mut visited = Visited { problem, tensors: Vec::new() };
        visit(checked, &mut visited).expect("the visitor takes every tensor");
        Validated { problem, visited: visited.tensors }
    }
}

/// The result of validation.
#[derive(Debug)]
struct Validated {
    problem: Problem,
    /// Every tensor that a launch receives.
    visited: Vec<(Tensor, Place)>,
}

/// Records the tensors that a launch receives.
struct Visited {
    problem: Problem,
    tensors: Vec<(Tensor, Place)>,
}

impl Visited {
    fn note(&mut self, tensor: Tensor, place: Place, storage: Storage, access: Access) {
        let expected = (tensor.access(self.problem.direction), self.problem.storage(tensor));
        assert_eq!(expected, (Some(access), Some(storage)), "{tensor}");
        self.tensors.push((tensor, place));
    }
}

impl Visitor<'_, Numbers> for Visited {
    fn read<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<View<E>>) -> Result<(), Error> {
        self.note(
            tensor,
            Place { span: rows.view.span, row_stride: rows.row_stride, groups: rows.groups },
            E::STORAGE,
            Access::Read,
        );
        Ok(())
    }

    fn write<E: AnyElement>(&mut self, tensor: Tensor, rows: Rows<View<E>>) -> Result<(), Error> {
        self.note(
            tensor,
            Place { span: rows.view.span, row_stride: rows.row_stride, groups: rows.groups },
            E::STORAGE,
            Access::Write,
        );
        Ok(())
    }
}

/// Looks up tensors, and records their names.
struct Names<'a> {
    call: &'a Call,
    names: &'a RefCell<BTreeSet<&'static str>>,
}

impl Names<'_> {
    fn find(&self, name: &'static str) -> Option<Place> {
        self.names.borrow_mut().insert(name);
        self.call.get(name)
    }

    fn view<E>(&self, name: &'static str) -> View<E> {
        View { span: self.find(name).expect("the call has that tensor").span, element: PhantomData }
    }

    fn source<E>(&self, name: &'static str, is_overwritten: bool) -> Source<View<E>, View<E>> {
        if is_overwritten { Source::Overwrite(self.rows(name)) } else { Source::Read(self.rows(name)) }
    }

    /// The target of a source, or `None` (and no look-up) if the call has no such target.
    fn target<E>(&self, name: &'static str, is_absent: bool) -> Option<Rows<View<E>>> {
        let is_given = !is_absent && self.find(name).is_some();
        is_given.then(|| self.rows(name))
    }

    fn optional_rows<E>(&self, name: &'static str) -> Option<Rows<View<E>>> {
        self.find(name).map(|_| self.rows(name))
    }

    /// The tensors that every quantized call must or may have.
    fn quantized<'v, T: Element, C: Code, W: Element, R: Element>(
        &self,
        quant: Option<QuantSpec>,
    ) -> QuantizedForward<'v, Numbers, T, C, W, R> {
        let optional = |name| self.find(name).is_some();
        QuantizedForward {
            quant: quant.expect("a quantized form"),
            x: self.rows("x"),
            weight: optional("weight").then(|| self.view("weight")),
            bias: optional("bias").then(|| self.view("bias")),
            residual: self.optional_rows("residual"),
            residual_out: self.optional_rows("residual_out"),
            y: self.optional_rows("y"),
            mean: optional("mean").then(|| self.view("mean")),
            rstd: optional("rstd").then(|| self.view("rstd")),
            codes: self.rows("codes"),
            codes_t: None,
            scale: None,
            scales: None,
            codes_columnwise: None,
            scales_columnwise: None,
            amax: None,
            gate: None,
            lost: None,
            dtypes: DTypes::of::<T, W, R>(),
        }
    }

    fn rows<E>(&self, name: &'static str) -> Rows<View<E>> {
        let Place { row_stride, groups, .. } = self.find(name).expect("the call has that tensor");
        Rows { view: self.view(name), row_stride, groups }
    }
}

/// The two names in an overlap error; `None` if the call was accepted. Panics on any other error.
fn overlap(result: Result<Validated, Error>) -> Option<(&'static str, &'static str)> {
    match result {
        Ok(_) => None,
        Err(Error::Overlap { output, other }) => Some((output, other)),
        Err(error) => panic!("not about an overlap: {error}"),
    }
}

/// Every pair of tensors of a form, as (fixed, moved).
fn pairs(form: Form) -> impl Iterator<Item = (&'static Entry, &'static Entry)> {
    let all = table(form);
    all.iter().flat_map(move |a| all.iter().filter(move |b| b.name != a.name).map(move |b| (a, b)))
}

/// Checks that the call is refused exactly if the two tensors must not share memory.
fn expect(call: &Call, mix: Mix, (a, b): (&Entry, &Entry), shares: bool, what: &str) {
    let form = call.form;
    let what = format!("{what}: {} and {} of {form:?} in {mix:?}", a.name, b.name);
    match overlap(call.check(mix)) {
        None => assert!(!(shares && (a.is_output || b.is_output)), "accepted: {what}"),
        Some((output, other)) => {
            assert!(shares, "refused: {what}");
            assert!(
                [(a, b), (b, a)].iter().any(|(a, b)| (a.name, b.name) == (output, other)),
                "{output}, {other}: {what}"
            );
            assert!(table(form).iter().any(|entry| entry.name == output && entry.is_output), "{output}: {what}");
        }
    }
}

/// Full overlap, one byte at either end, adjacent, and equal addresses in another allocation.
#[test]
fn every_pair_of_tensors_is_kept_apart_unless_both_are_read() {
    for form in Form::ALL {
        for mix in MIXES {
            for (a, b) in pairs(form) {
                let whole = Call::full(form);
                let (place_a, place_b) = (whole.get(a.name).expect("a"), whole.get(b.name).expect("b"));
                let (len_a, len_b) =
                    ((place_a.span.len * size(a, mix)) as u64, (place_b.span.len * size(b, mix)) as u64);
                let start = place_a.span.start;
                for (what, moved, shares) in [
                    ("the same place", start, true),
                    ("the last byte of the first", start + len_a - 1, true),
                    ("the first byte of the first", start - len_b + 1, true),
                    ("right behind", start + len_a, false),
                    ("right in front", start - len_b, false),
                ] {
                    let mut call = whole.clone();
                    call.set(b.name, |place| place.span = Span { start: moved, ..place_a.span });
                    call.set(b.name, |place| place.span.len = place_b.span.len);
                    expect(&call, mix, (a, b), shares, what);
                }
                // All tensors in their own allocations.
                expect(&whole, mix, (a, b), false, "other allocations");
                // A vector has no rows, at any distance. Views begin at an element.
                if a.shape != Shape::Matrix || b.shape != Shape::Matrix {
                    let step = size(a, mix).min(size(b, mix)) as u64;
                    for moved in (start - len_b - step..=start + len_a + step).step_by(step as usize) {
                        let mut call = whole.clone();
                        let len = place_b.span.len;
                        call.set(b.name, |place| place.span = Span { start: moved, len, ..place_a.span });
                        let shares = moved < start + len_a && start < moved + len_b;
                        expect(&call, mix, (a, b), shares, &format!("{moved} to {start}"));
                    }
                }
            }
        }
    }
}

/// The bytes of a matrix's elements.
fn bytes(place: Place, row_stride: usize, size: usize) -> BTreeSet<u64> {
    let row = |row: usize| {
        let first = place.span.start + (row * row_stride * size) as u64;
        first..first + (COLS * size) as u64
    };
    (0..ROWS).flat_map(row).collect()
}

/// Interleaved rows of two matrices in one buffer, of any dtypes: accepted exactly if they share no
/// byte. Different row strides in bytes are not analyzed, and refused.
#[test]
fn rows_of_two_matrices_may_take_turns_if_no_byte_is_shared() {
    // Strides of 60 or 120 elements, both 240 bytes, for rows of 20 or 40 bytes.
    for form in Form::ALL {
        for mix in MIXES {
            let both_matrices = |(a, b): &(&Entry, &Entry)| a.shape == Shape::Matrix && b.shape == Shape::Matrix;
            for (a, b) in pairs(form).filter(both_matrices) {
                let sizes = [size(a, mix), size(b, mix)];
                let of_bytes = sizes.map(|size| 240 / size);
                let place = |start: u64, stride: usize| Place {
                    span: Span { allocation: 77, start, len: (ROWS - 1) * stride + COLS },
                    row_stride: Some(stride),
                    groups: None,
                };
                for start in (4096 - 300..4096 + 300u64).step_by(2) {
                    for strides in [of_bytes, [of_bytes[0], of_bytes[0]], [of_bytes[0] + 2, of_bytes[1]]] {
                        let places = [place(4096, strides[0]), place(start, strides[1])];
                        let mut call = Call::full(form);
                        call.set(a.name, |place| *place = places[0]);
                        call.set(b.name, |place| *place = places[1]);
                        let [of_a, of_b] = [0, 1].map(|i| bytes(places[i], strides[i], sizes[i]));
                        let shares = of_a.intersection(&of_b).next().is_some();
                        let ranges_meet = of_a.first() <= of_b.last() && of_b.first() <= of_a.last();
                        let takes_turns = strides[0] * sizes[0] == strides[1] * sizes[1];
                        let refused = shares || (ranges_meet && !takes_turns);
                        expect(&call, mix, (a, b), refused, &format!("{start}, strides {strides:?}"));
                    }
                }
            }
        }
    }
}

/// A vector in the gaps of a matrix is not interleaved with its rows.
#[test]
fn a_vector_between_the_rows_of_a_matrix_is_refused() {
    for form in Form::ALL {
        for mix in MIXES {
            let of_matrix_and_vector = |(a, b): &(&Entry, &Entry)| a.shape == Shape::Matrix && b.shape != Shape::Matrix;
            for (a, b) in pairs(form).filter(of_matrix_and_vector) {
                let mut call = Call::full(form);
                let span = Span { allocation: 77, start: 0, len: (ROWS - 1) * 200 + COLS };
                call.set(a.name, |place| *place = Place { span, row_stride: Some(200), groups: None });
                let start = (COLS * size(a, mix)) as u64 + 8;
                call.set(b.name, |place| place.span = Span { allocation: 77, start, ..place.span });
                expect(&call, mix, (a, b), true, "in a gap");
            }
        }
    }
}

/// A single row, or a view that ends with its stride, interleaves like other rows; a vector as long
/// as the stride does not.
#[test]
fn single_rows_and_whole_strides_take_turns_too() {
    let place =
        |start: u64, len| Place { span: Span { allocation: 7, start, len }, row_stride: Some(3 * COLS), groups: None };
    for (rows, len) in [(1, COLS), (1, 3 * COLS), (3, 7 * COLS), (3, 9 * COLS)] {
        // Rows of 40 bytes, at a stride of 120.
        for (start, shares) in [(0, true), (36, true), (40, false), (80, false), (84, rows > 1)] {
            // The view of a single row that reaches the next row must not hold elements of the
            // other matrix.
            if (rows, len, start) == (1, 3 * COLS, 84) {
                continue;
            }
            let mut call = Call::full(Form::InPlace);
            call.spec.rows = rows;
            for name in ["mean", "rstd"] {
                call.set(name, |tensor| tensor.span.len = rows);
            }
            call.set("x", |tensor| *tensor = place(4000, len));
            call.set("residual", |tensor| *tensor = place(4000 + start, len));
            assert_eq!(overlap(call.check(MIXES[0])).is_some(), shares, "{rows} rows of {len} elements, {start}");
        }
    }
    let mut call = Call::full(Form::Forward);
    call.spec.rows = COLS;
    for entry in table(Form::Forward).iter().filter(|entry| entry.shape != Shape::OfCols) {
        let len = if entry.shape == Shape::Matrix { COLS * COLS } else { COLS };
        call.set(entry.name, |place| place.span.len = len);
    }
    let x = call.get("x").expect("x").span;
    call.set("mean", |place| place.span = Span { start: x.start + 4 * COLS as u64, len: COLS, ..x });
    assert_eq!(overlap(call.check(MIXES[0])), Some(("mean", "x")));
}

/// A view without elements shares nothing, even inside another tensor.
#[test]
fn tensors_of_no_rows_overlap_nothing() {
    for form in Form::ALL {
        let mut call = Call::full(form);
        call.spec.rows = 0;
        for entry in
            table(form).iter().filter(|entry| matches!(entry.shape, Shape::Matrix | Shape::Transposed | Shape::OfRows))
        {
            // Inside every vector of `cols` elements.
            call.set(entry.name, |place| place.span = Span { allocation: 1, start: 4096 + 8, len: 0 });
        }
        for entry in table(form).iter().filter(|entry| entry.shape == Shape::OfCols && !entry.is_output) {
            call.set(entry.name, |place| place.span = Span { allocation: 1, start: 4096, len: COLS });
        }
        assert_eq!(overlap(call.check(MIXES[0])), None, "{form:?}");
    }
}

#[test]
fn addresses_at_the_end_of_their_range_do_not_wrap() {
    let mut call = Call::full(Form::Forward);
    let last = |bytes: u64, len| {
        let span = Span { allocation: 9, start: u64::MAX - bytes, len };
        Place { span, row_stride: None, groups: None }
    };
    call.set("x", |place| *place = last(119, ROWS * COLS));
    call.set("y", |place| *place = last(239, ROWS * COLS));
    assert_eq!(overlap(call.check(MIXES[0])), None);
    call.set("y", |place| *place = last(238, ROWS * COLS));
    assert_eq!(overlap(call.check(MIXES[0])), Some(("y", "x")));
}

/// All sets of optional tensors are accepted, except a sum without a residual, and reported
/// correctly.
#[test]
fn the_problem_says_which_tensors_there_are() {
    for form in Form::ALL {
        let optional: Vec<&Entry> = table(form).iter().filter(|entry| entry.is_optional).collect();
        for bits in 0u32..1 << optional.len() {
            let is_given = |name: &str| {
                let place = optional.iter().position(|entry| entry.name == name);
                place.map_or(table(form).iter().any(|entry| entry.name == name), |i| bits >> i & 1 == 1)
            };
            let mut call = Call::full(form);
            for entry in optional.iter().filter(|entry| !is_given(entry.name)) {
                call = call.without(entry.name);
            }
            let result = call.check(MIXES[2]);
            if matches!(form, Form::Forward | Form::Gated | Form::Given | Form::Mx)
                && is_given("residual_out")
                && !is_given("residual")
            {
                assert!(matches!(result, Err(Error::Unexpected { arg: "residual_out", .. })), "{result:?}");
                continue;
            }
            let checked = result.expect("a good call");
            for tensor in Tensor::ALL {
                let expected = match (form, tensor) {
                    // An overwritten tensor is the result.
                    (Form::InPlace, Tensor::X | Tensor::Residual) | (Form::AfterInPlace, Tensor::Residual) => false,
                    (Form::InPlace, Tensor::Y) => true,
                    (Form::InPlace | Form::AfterInPlace, Tensor::ResidualOut) => is_given("residual"),
                    _ => is_given(tensor.name()),
                };
                assert_eq!(checked.problem.has(tensor), expected, "{tensor} of {form:?}, set {bits:#b}");
            }
            let visited: Vec<Tensor> = checked.visited.iter().map(|(tensor, _)| *tensor).collect();
            assert_eq!(visited.iter().copied().collect::<TensorSet>(), checked.problem.tensors);
            assert_eq!(visited.len(), checked.problem.tensors.iter().count(), "each of them once");
        }
    }
}

#[test]
fn the_problem_says_what_is_computed() {
    for form in Form::ALL {
        for mix in MIXES {
            for norm in Norm::ALL {
                for (weight_offset, has_weight_offset) in [(0.0, false), (-0.0, false), (-0.5, true), (1e-30, true)] {
                    for cast_order in [CastOrder::AtStore, CastOrder::BeforeWeight, CastOrder::RstdFirst] {
                        let mut call = Call::full(form);
                        if norm != Norm::Layer {
                            call = call.without("mean").without("next_mean");
                        }
                        call.spec = NormSpec { norm, weight_offset, cast_order, ..call.spec };
                        call.grad_reduction = GradReduction::Locks { groups: 3 };
                        let problem = call.check(mix).expect("a good call").problem;
                        let [activation, weight, residual] = mix;
                        let expected = Problem {
                            direction: form.direction(),
                            norm,
                            rows: ROWS,
                            cols: COLS,
                            dtypes: DTypes { activation, weight, residual },
                            has_weight_offset,
                            cast_order,
                            residual_placement: form.placement(),
                            parts: 1,
                            gate: form.gate(),
                            groups: 1,
                            quant: form.quant(),
                            grad_store: GradStore::Rounded,
                            grad_reduction: match form {
                                Form::Forward | Form::InPlace | Form::After | Form::AfterInPlace => {
                                    GradReduction::Partials
                                }
                                Form::Gated | Form::Given | Form::Mx => GradReduction::Partials,
                                Form::Backward | Form::GatedBackward => GradReduction::Locks { groups: 3 },
                            },
                            tensors: problem.tensors,
                            rows_per_group: None,
                        };
                        assert_eq!(problem, expected);
                    }
                }
            }
        }
    }
}

/// Each tensor has its own address and each matrix its own stride, and a launch receives them
/// unchanged.
#[test]
fn views_and_strides_come_out_as_they_went_in() {
    for form in Form::ALL {
        let mut call = Call::full(form);
        for (i, entry) in table(form).iter().enumerate() {
            let stride = COLS + 1 + i;
            call.set(entry.name, |place| {
                place.span.start += 4 * i as u64;
                if entry.shape == Shape::Matrix && i % 3 != 0 {
                    place.row_stride = Some(stride);
                    place.span.len = (ROWS - 1) * stride + COLS;
                }
            });
        }
        let Validated { problem, visited } = call.check(MIXES[0]).expect("a good call");
        for (tensor, place) in visited {
            let arg = match (form, tensor) {
                (Form::InPlace, Tensor::Y) => "x",
                (Form::InPlace | Form::AfterInPlace, Tensor::ResidualOut) => "residual",
                _ => tensor.name(),
            };
            let given = call.get(arg).expect("a tensor of the call");
            assert_eq!((place.span, place.row_stride), (given.span, given.row_stride), "{tensor} of {form:?}");
            assert_eq!(problem.arg(tensor), arg, "{form:?}");
        }
    }
}

/// A result has one destination, and a residual is overwritten exactly if x is.
#[test]
fn what_is_overwritten_is_said_once() {
    type Args<'a> = Forward<'a, Numbers, f32>;
    let view = |allocation| View::<f32> { span: Span { allocation, start: 0, len: ROWS * COLS }, element: PhantomData };
    let check = |args: Args<'_>| Checked::forward(NormSpec::rms(ROWS, COLS, 1e-5), args).map(|c| *c.problem());
    let (separate, in_place) = (|| Args::new(view(1), view(2)), || Args::in_place(view(1)));
    let good = |args| check(args).expect("a good call").tensors;
    assert_eq!(good(in_place().residual_in_place(view(3))), TensorSet::of(&[Tensor::Y, Tensor::ResidualOut]));
    let all = [Tensor::X, Tensor::Y, Tensor::Residual, Tensor::ResidualOut];
    assert_eq!(good(separate().residual(view(3)).residual_out(view(4))), TensorSet::of(&all));

    let refused = |args| match check(args) {
        Err(Error::Unexpected { arg, .. } | Error::Missing { arg, .. }) => arg,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(Args { y: None, ..separate() }), "y");
    assert_eq!(refused(Args { y: Some(view(2).into()), ..in_place() }), "y");
    assert_eq!(refused(in_place().residual(view(3))), "residual");
    assert_eq!(refused(separate().residual_in_place(view(3))), "residual");
    assert_eq!(refused(separate().residual_out(view(4))), "residual_out");
    assert_eq!(refused(in_place().residual_in_place(view(3)).residual_out(view(4))), "residual_out");
}

/// Groups divide the columns, and each has its own statistics.
#[test]
fn groups_of_columns_divide_a_row_and_have_their_own_statistics() {
    let check = |form: Form, groups: usize| {
        let mut call = Call::full(form);
        call.spec.groups = groups;
        for name in ["mean", "rstd"] {
            call.set(name, |place| place.span.len = ROWS * groups);
        }
        call.check(MIXES[2]).map(|checked| checked.problem)
    };
    for form in [Form::Forward, Form::InPlace, Form::Gated, Form::Backward, Form::GatedBackward, Form::Given, Form::Mx]
    {
        for groups in [1, 2, 5, COLS] {
            let problem = check(form, groups).expect("a good call");
            assert_eq!((problem.groups, problem.require_one_group("numbers").is_ok()), (groups, groups == 1));
        }
        for groups in [0, 3, COLS + 1] {
            let refused = check(form, groups);
            assert!(matches!(refused, Err(Error::InvalidArgument { arg: "groups", .. })), "{refused:?}");
        }
        let mut call = Call::full(form);
        call.spec.groups = 2;
        let few = call.check(MIXES[2]).map(|checked| checked.problem);
        let expected = 2 * ROWS;
        assert!(matches!(few, Err(Error::Length { arg: "mean", min, .. }) if min == expected), "{few:?}");
    }
    assert!(matches!(check(Form::AfterInPlace, 2), Err(Error::Unsupported { .. })));
    let halves = check_columns_form(&NormSpec::rms(ROWS, COLS, 1e-5).groups(2), None);
    assert!(matches!(halves, Err(Error::Unsupported { .. })), "{halves:?}");
}

/// A gate and its activation come together; a gated x has no residual, and only a gate after the
/// norm reads the bias in backward.
#[test]
fn a_gate_has_its_activation_and_no_sums_beside_it() {
    type Args<'a> = Forward<'a, Numbers, f32>;
    let view = |allocation| View::<f32> { span: Span { allocation, start: 0, len: ROWS * COLS }, element: PhantomData };
    let vector = |allocation, len| View::<f32> { span: Span { allocation, start: 0, len }, element: PhantomData };
    let plain = NormSpec::rms(ROWS, COLS, 1e-5);
    let [before, after] = [plain.gate_before(Activation::Sigmoid), plain.gate_after(Activation::Silu)];
    let refused = |result: Result<Problem, Error>| match result {
        Err(Error::Unexpected { arg, .. } | Error::Missing { arg, .. } | Error::InvalidArgument { arg, .. }) => arg,
        Err(Error::Unsupported { .. }) => "unsupported",
        other => panic!("{other:?}"),
    };

    let check = |spec: NormSpec, args: Args<'_>| Checked::forward(spec, args).map(|checked| *checked.problem());
    let args = || Args::new(view(1), view(2));
    assert_eq!(refused(check(plain, args().gate(view(3)))), "gate");
    let sum = || args().gate(view(3)).residual(view(4)).residual_out(view(5));
    for (spec, piece) in [(before, Piece::GateBefore), (after, Piece::GateAfter)] {
        let problem = check(spec, args().gate(view(3))).expect("a good call");
        assert_eq!((problem.gate, problem.pieces()), (spec.gate, PieceSet::of(&[piece])));
        assert_eq!(problem.tensors, TensorSet::of(&[Tensor::X, Tensor::Y, Tensor::Gate]));
        assert!(problem.require_pieces("numbers", PieceSet::NONE).is_err());
        check(spec, Args::in_place(view(1)).gate(view(3))).expect("a good call in place");
        assert_eq!(refused(check(spec, args())), "gate");
        assert_eq!(refused(check(spec.residual_after(), sum())), "unsupported");
        assert_eq!(refused(check(spec, args().gate(view(3)).parts(2, 0))), "x");
        let two = View { span: Span { allocation: 1, start: 0, len: 2 * ROWS * COLS }, element: PhantomData };
        assert_eq!(refused(check(spec, Args::new(two, view(2)).gate(view(3)).parts(2, ROWS * COLS))), "unsupported");
        let short = check(spec, args().gate(vector(3, COLS)));
        assert!(matches!(short, Err(Error::Length { arg: "gate", .. })), "{short:?}");
        let shared = check(spec, args().gate(view(2)));
        assert!(matches!(shared, Err(Error::Overlap { output: "y", other: "gate" })), "{shared:?}");
        let halves = check_columns_form(&spec, None);
        assert!(matches!(halves, Err(Error::Unsupported { .. })), "{halves:?}");
    }
    assert_eq!(refused(check(before, sum())), "unsupported");
    check(after, sum()).expect("a good call");

    type Quantized<'a> = QuantizedForward<'a, Numbers, f32, F8E4M3>;
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
    let quantized =
        |spec, args: Quantized<'_>| Checked::quantized_forward(spec, args).map(|checked| *checked.problem());
    let codes = View::<F8E4M3> { span: view(2).span, element: PhantomData };
    let args = || Quantized::new(quant, view(1), codes).scales(vector(6, ROWS));
    assert_eq!(refused(quantized(plain, args().gate(view(3)))), "gate");
    assert_eq!(refused(quantized(after, args())), "gate");
    assert_eq!(refused(quantized(before, args().gate(view(3)).residual(view(4)))), "unsupported");
    quantized(after, args().gate(view(3)).residual(view(4))).expect("a good call");

    type Gradients<'a> = Backward<'a, Numbers, f32>;
    let backward =
        |spec, args: Gradients<'_>| Checked::backward(&Numbers::<false>, spec, args).map(|checked| *checked.problem());
    let args = || Gradients::new(view(1), view(2), vector(7, ROWS), view(3));
    assert_eq!(refused(backward(plain, args().dgate(view(4)))), "dgate");
    assert_eq!(refused(backward(plain, args().bias(vector(8, COLS)))), "bias");
    assert_eq!(refused(backward(plain, args().gate(view(4)))), "gate");
    assert_eq!(refused(backward(after, args())), "gate");
    backward(after, args().gate(view(4)).dgate(view(5)).bias(vector(8, COLS))).expect("a good call");
    backward(after, args().gate(view(4)).dresidual_out(view(5))).expect("a good call");
    backward(before, args().gate(view(4)).dgate(view(5))).expect("a good call");
    assert_eq!(refused(backward(before, args().gate(view(4)).bias(vector(8, COLS)))), "bias");
    assert_eq!(refused(backward(before, args().gate(view(4)).dresidual_out(view(5)))), "unsupported");
    let half = |allocation| View::<f16> { span: view(allocation).span, element: PhantomData };
    let mixed = Backward::<Numbers, f16, f16, f32>::mixed(half(1), view(2), vector(7, ROWS), half(3)).gate(half(4));
    let mixed = Checked::backward(&Numbers::<false>, before, mixed).map(|checked| *checked.problem());
    assert_eq!(refused(mixed), "x");
}

/// A weight before the norm is there, and nothing else makes what is normalized.
#[test]
fn a_weight_before_the_norm_has_no_sums_and_no_gate_beside_it() {
    type Args<'a> = Forward<'a, Numbers, f32>;
    let view = |allocation| View::<f32> { span: Span { allocation, start: 0, len: ROWS * COLS }, element: PhantomData };
    let vector = |allocation, len| View::<f32> { span: Span { allocation, start: 0, len }, element: PhantomData };
    let first = NormSpec::rms(ROWS, COLS, 1e-5).cast_order(CastOrder::WeightFirst);
    let weight = || vector(9, COLS);
    let refused = |result: Result<Problem, Error>| match result {
        Err(Error::Missing { arg, .. } | Error::InvalidArgument { arg, .. }) => arg,
        Err(Error::Unsupported { .. }) => "unsupported",
        other => panic!("{other:?}"),
    };

    let check = |spec: NormSpec, args: Args<'_>| Checked::forward(spec, args).map(|checked| *checked.problem());
    let args = || Args::new(view(1), view(2)).weight(weight());
    let problem = check(first, args()).expect("a good call");
    assert_eq!(problem.pieces(), PieceSet::of(&[Piece::WeightFirst]));
    assert!(problem.require_pieces("numbers", PieceSet::NONE).is_err());
    check(first.gate_after(Activation::Silu), args().gate(view(3))).expect("a good call with a gate");
    check(first.groups(5), args().bias(vector(8, COLS))).expect("a good call with groups");
    check(first, Args::in_place(view(1)).weight(weight())).expect("a good call in place");
    assert_eq!(refused(check(first, Args::new(view(1), view(2)))), "weight");
    let sum = || args().residual(view(4)).residual_out(view(5));
    assert_eq!(refused(check(first, sum())), "unsupported");
    assert_eq!(refused(check(first.residual_after(), sum())), "unsupported");
    assert_eq!(refused(check(first.gate_before(Activation::Silu), args().gate(view(3)))), "unsupported");
    let two = View { span: Span { allocation: 1, start: 0, len: 2 * ROWS * COLS }, element: PhantomData };
    let parts = Args::new(two, view(2)).weight(weight()).parts(2, ROWS * COLS);
    assert_eq!(refused(check(first, parts)), "unsupported");
    let halves = check_columns_form(&first, None);
    assert!(matches!(halves, Err(Error::Unsupported { .. })), "{halves:?}");

    type Quantized<'a> = QuantizedForward<'a, Numbers, f32, F8E4M3>;
    let quant = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
    let quantized =
        |spec, args: Quantized<'_>| Checked::quantized_forward(spec, args).map(|checked| *checked.problem());
    let codes = View::<F8E4M3> { span: view(2).span, element: PhantomData };
    let args = || Quantized::new(quant, view(1), codes).scales(vector(6, ROWS));
    quantized(first, args().weight(weight())).expect("a good call");
    assert_eq!(refused(quantized(first, args())), "weight");
    assert_eq!(refused(quantized(first, args().weight(weight()).residual(view(4)))), "unsupported");

    type Gradients<'a> = Backward<'a, Numbers, f32>;
    let backward =
        |spec, args: Gradients<'_>| Checked::backward(&Numbers::<false>, spec, args).map(|checked| *checked.problem());
    let args = || Gradients::new(view(1), view(2), vector(7, ROWS), view(3));
    backward(first, args().weight(weight()).dweight(vector(8, COLS))).expect("a good call");
    assert_eq!(refused(backward(first, args())), "weight");
    assert_eq!(refused(backward(first, args().weight(weight()).dresidual_out(view(5)))), "unsupported");
    let half = |allocation| View::<f16> { span: view(allocation).span, element: PhantomData };
    let mixed = Backward::<Numbers, f16, f16, f32>::mixed(half(1), view(2), vector(7, ROWS), half(3));
    let mixed = mixed.weight(View::<f16> { span: weight().span, element: PhantomData });
    let mixed = Checked::backward(&Numbers::<false>, first, mixed).map(|checked| *checked.problem());
    assert_eq!(refused(mixed), "x");
}

/// The sum of a residual and a norm has a destination, and the next norm has a y.
#[test]
fn a_residual_after_the_norm_needs_its_sum_and_a_next_norm_its_y() {
    type Args<'a> = Forward<'a, Numbers, f32>;
    let view = |allocation| View::<f32> { span: Span { allocation, start: 0, len: ROWS * COLS }, element: PhantomData };
    let vector = |allocation, len| View::<f32> { span: Span { allocation, start: 0, len }, element: PhantomData };
    let before = NormSpec::rms(ROWS, COLS, 1e-5);
    let check = |spec: NormSpec, args: Args<'_>| Checked::forward(spec, args).map(|checked| *checked.problem());
    let good = |args| check(before.residual_after(), args).expect("a good call");
    let (alone, paired) = (|| Args::added_to_residual(view(1)), || Args::new(view(1), view(2)));

    let problem = good(alone().residual(view(3)).residual_out(view(4)));
    assert_eq!(problem.residual_placement, ResidualPlacement::After);
    assert_eq!(problem.tensors, TensorSet::of(&[Tensor::X, Tensor::Residual, Tensor::ResidualOut]));
    assert_eq!(problem.arg(Tensor::ResidualOut), "residual_out");
    let lacks = problem.require_pieces("numbers", PieceSet::of(&[Piece::Residual]));
    assert!(
        matches!(lacks, Err(Error::Unsupported { rule }) if rule == "the numbers backend adds no residual after the norm")
    );
    let problem = good(alone().residual_in_place(view(3)));
    assert_eq!(problem.tensors, TensorSet::of(&[Tensor::X, Tensor::ResidualOut]));
    assert_eq!((problem.arg(Tensor::X), problem.arg(Tensor::ResidualOut)), ("x", "residual"));
    let problem = good(paired().residual_in_place(view(3)).next_weight(vector(5, COLS)).next_rstd(vector(6, ROWS)));
    let tensors = [Tensor::X, Tensor::Y, Tensor::ResidualOut, Tensor::NextWeight, Tensor::NextRstd];
    assert_eq!(problem.tensors, TensorSet::of(&tensors));
    let problem = check(before, paired()).expect("a good call");
    assert!(problem.require_pieces("numbers", PieceSet::NONE).is_ok());

    let refused = |spec, args| match check(spec, args) {
        Err(Error::Unexpected { arg, .. } | Error::Missing { arg, .. }) => arg,
        other => panic!("{other:?}"),
    };
    let after = |args| refused(before.residual_after(), args);
    assert_eq!(after(alone()), "residual");
    assert_eq!(after(paired()), "residual");
    assert_eq!(after(alone().residual_out(view(4))), "residual");
    assert_eq!(after(alone().residual(view(3))), "residual_out");
    assert_eq!(after(alone().residual_in_place(view(3)).residual_out(view(4))), "residual_out");
    assert_eq!(after(Args::in_place(view(1)).residual_in_place(view(3))), "x");
    assert_eq!(after(paired().residual_in_place(view(3)).next_mean(vector(5, ROWS))), "next_mean");
    // Each tensor of the next norm is refused without a y, and with a residual before the norm.
    type Give = for<'a> fn(Args<'a>, View<f32>, View<f32>) -> Args<'a>;
    let next: [(&str, Give); 4] = [
        ("next_weight", |args, of_cols, _| args.next_weight(of_cols)),
        ("next_bias", |args, of_cols, _| args.next_bias(of_cols)),
        ("next_mean", |args, _, of_rows| args.next_mean(of_rows)),
        ("next_rstd", |args, _, of_rows| args.next_rstd(of_rows)),
    ];
    for (name, give) in next {
        let given = |args| give(args, vector(5, COLS), vector(6, ROWS));
        assert_eq!(after(given(alone().residual_in_place(view(3)))), name);
        assert_eq!(refused(before, given(paired())), name);
    }

    // The residual's gradient is dy, and no call quantizes such a sum.
    let backward = || Backward::<Numbers, f32>::new(view(1), view(2), vector(3, ROWS), view(4));
    let check =
        |args| Checked::backward(&Numbers::<false>, before.residual_after(), args).map(|checked| *checked.problem());
    assert_eq!(check(backward()).expect("a good call").residual_placement, ResidualPlacement::Before);
    for (args, name) in
        [(backward().dresidual_out(view(5)), "dresidual_out"), (backward().dresidual(view(5)), "dresidual")]
    {
        assert!(matches!(check(args), Err(Error::Unexpected { arg, .. }) if arg == name), "{name}");
    }
    let mut call = Call::full(Form::Given);
    call.spec = call.spec.residual_after();
    assert!(matches!(call.check(MIXES[0]), Err(Error::Unsupported { .. })));
}

/// A tensor's dtype must be set before the tensor; a later change is an error, not a silent loss.
#[test]
fn a_tensor_given_before_its_dtype_changes_is_named() {
    fn view<E>(allocation: u64, len: usize) -> View<E> {
        View { span: Span { allocation, start: 0, len }, element: PhantomData }
    }
    let matrix = |allocation| view::<f16>(allocation, ROWS * COLS);
    let spec = NormSpec::rms(ROWS, COLS, 1e-5);
    let forward = || Forward::<Numbers, f16>::new(matrix(1), matrix(2));
    let backward = || Backward::<Numbers, f16>::new(matrix(1), matrix(2), view(3, ROWS), matrix(4));
    let (narrow, wide) = (|n| view::<f16>(n, COLS), |n| view::<f32>(n, COLS));

    let dtypes = |result: Result<Problem, Error>| result.expect("a good call").dtypes;
    let good = forward().f32_weight().f32_residual().weight(wide(5)).residual(view(6, ROWS * COLS));
    let mixed = DTypes::uniform(DType::F16);
    assert_eq!(dtypes(Checked::forward(spec, good).map(|c| *c.problem())), mixed.widened(true, true));
    let good = Checked::backward(&Numbers::<false>, spec, backward().f32_weight().dweight(wide(5)));
    assert_eq!(dtypes(good.map(|c| *c.problem())), mixed.widened(true, false));

    let lost = |result: Result<(), Error>| match result {
        Err(Error::Unexpected { arg, .. }) => arg,
        other => panic!("{other:?}"),
    };
    let forward_of = |args: Forward<'_, Numbers, f16, f32, f16>| lost(Checked::forward(spec, args).map(drop));
    assert_eq!(forward_of(forward().weight(narrow(5)).f32_weight()), "weight");
    assert_eq!(forward_of(forward().bias(narrow(5)).f32_weight().bias(wide(6))), "bias");
    assert_eq!(forward_of(forward().next_weight(narrow(5)).f32_weight()), "next_weight");
    assert_eq!(forward_of(forward().next_bias(narrow(5)).f32_weight()), "next_bias");
    let streamed = |args: Forward<'_, Numbers, f16, f16, f32>| lost(Checked::forward(spec, args).map(drop));
    assert_eq!(streamed(forward().residual(matrix(5)).f32_residual()), "residual");
    assert_eq!(streamed(forward().residual_out(matrix(5)).f32_residual()), "residual_out");
    let backward_of =
        |args: Backward<'_, Numbers, f16, f32>| lost(Checked::backward(&Numbers::<false>, spec, args).map(drop));
    assert_eq!(backward_of(backward().weight(narrow(5)).f32_weight()), "weight");
    assert_eq!(backward_of(backward().dweight(narrow(5)).f32_weight()), "dweight");
    assert_eq!(backward_of(backward().dbias(narrow(5)).f32_weight()), "dbias");
}

/// One element fewer, one more, and a stride one less, for every tensor.
#[test]
fn every_length_and_stride_is_held_to_its_limits() {
    for form in Form::ALL {
        for entry in table(form) {
            let (name, whole) = (entry.name, Call::full(form));
            let len = whole.get(name).expect("a tensor").span.len;
            for (change, is_good) in [(-1isize, false), (0, true), (1, entry.shape == Shape::Workspace)] {
                let mut call = whole.clone();
                call.set(name, |place| place.span.len = len.saturating_add_signed(change));
                match call.check(MIXES[3]) {
                    Ok(_) => assert!(is_good, "{name} of {form:?} with {change:+} elements was accepted"),
                    Err(Error::Length { arg, min, max, got }) => {
                        assert!(!is_good && arg == name, "{arg} for {name} of {form:?}");
                        let most = if entry.shape == Shape::Workspace { usize::MAX } else { len };
                        assert_eq!((min, max, got), (len, most, len.saturating_add_signed(change)));
                    }
                    Err(error) => panic!("{name} of {form:?}: {error}"),
                }
            }
            if entry.shape == Shape::Matrix {
                let mut call = whole.clone();
                call.set(name, |place| place.row_stride = Some(COLS - 1));
                let error = call.check(MIXES[3]).map(|_| ()).expect_err("rows that overlap");
                assert!(matches!(error, Error::Stride { arg, cols: COLS, got: 9 } if arg == name), "{name}: {error}");
                let mut call = whole;
                call.set(name, |place| place.row_stride = Some(usize::MAX / 2));
                let error = call.check(MIXES[3]).map(|_| ()).expect_err("no memory is that large");
                assert!(matches!(error, Error::TooLarge { arg, rows: ROWS, .. } if arg == name), "{name}: {error}");
            }
        }
    }
}

/// Checks that the length of the tensor is accepted exactly within these limits, and that the
/// message has both.
fn expect_length(call: &Call, (name, len): (&str, usize), (least, most): (usize, usize)) {
    match call.check(MIXES[4]) {
        Ok(_) => assert!((least..=most).contains(&len), "{name}: {len}"),
        Err(Error::Length { arg, min, max, got }) => {
            assert!(!(least..=most).contains(&len), "{name}: {len}");
            assert_eq!((arg, min, max, got), (name, least, most, len));
        }
        Err(error) => panic!("{name} of {:?}: {error}", call.form),
    }
}

/// Strided rows: the padding after the last row is optional, and the message has both lengths.
#[test]
fn a_strided_matrix_may_end_with_its_last_element_or_its_stride() {
    for form in Form::ALL {
        for entry in table(form).iter().filter(|entry| entry.shape == Shape::Matrix) {
            let (least, most) = ((ROWS - 1) * 12 + COLS, ROWS * 12);
            for len in least - 1..=most + 1 {
                let mut call = Call::full(form);
                call.set(entry.name, |place| (place.row_stride, place.span.len) = (Some(12), len));
                expect_length(&call, (entry.name, len), (least, most));
            }
        }
    }
}

/// The largest size of a tensor is isize::MAX bytes, for each dtype.
#[test]
fn the_largest_tensor_is_admitted_and_no_larger_one() {
    for (mix, size) in [(MIXES[0], 4), (MIXES[1], 2)] {
        let most = isize::MAX as usize / size;
        for (rows, is_good) in [(most, true), (most + 1, false)] {
            let mut call = Call::full(Form::InPlace).without("residual").without("weight").without("bias");
            call = call.without("mean").without("rstd");
            call.spec = NormSpec::rms(rows, 1, 0.0);
            call.set("x", |place| place.span.len = rows);
            let result = call.check(mix);
            assert_eq!(result.is_ok(), is_good, "{rows} elements of {size} bytes: {result:?}");
            assert!(is_good || matches!(result, Err(Error::TooLarge { arg: "x", .. })));
        }
    }
}

#[test]
fn scalars_are_held_to_their_limits() {
    for form in Form::ALL {
        for (eps, is_good) in [(0.0, true), (-0.0, true), (f32::MIN_POSITIVE, true), (f32::MAX, true), (-1e-45, false)]
        {
            let mut call = Call::full(form);
            call.spec.eps = eps;
            assert_eq!(call.check(MIXES[0]).is_ok(), is_good, "eps {eps} of {form:?}");
        }
        for (offset, is_good) in
            [(-1.0, true), (f32::MIN, true), (f32::MAX, true), (f32::INFINITY, false), (f32::NEG_INFINITY, false)]
        {
            let mut call = Call::full(form);
            call.spec.weight_offset = offset;
            let result = call.check(MIXES[0]);
            assert_eq!(result.is_ok(), is_good, "weight_offset {offset} of {form:?}");
            assert!(is_good || matches!(result, Err(Error::InvalidWeightOffset { .. })));
        }
    }
}

/// Statistics that each norm and direction must, may and must not have.
#[test]
fn statistics_are_asked_for_and_refused_by_norm_and_direction() {
    for form in Form::ALL {
        for norm in Norm::ALL {
            // Backward's rstd has no Option type.
            for (has_mean, has_rstd) in [(true, true), (true, false), (false, true), (false, false)] {
                if form.direction() == Direction::Backward && !has_rstd {
                    continue;
                }
                let mut call = Call::full(form);
                call.spec.norm = norm;
                call = if has_mean { call } else { call.without("mean").without("next_mean") };
                call = if has_rstd { call } else { call.without("rstd") };
                let result = call.check(MIXES[1]);
                let what = format!("{form:?} {norm:?}, mean: {has_mean}, rstd: {has_rstd}: {result:?}");
                let is_backward = form.direction() == Direction::Backward;
                match (norm, is_backward) {
                    (Norm::Rms | Norm::L2 | Norm::L2Clamped, _) if has_mean => {
                        assert!(matches!(result, Err(Error::Unexpected { arg: "mean", .. })), "{what}");
                    }
                    (Norm::Layer, true) if !has_mean => {
                        assert!(matches!(result, Err(Error::Missing { arg: "mean", .. })), "{what}");
                    }
                    (Norm::Rms | Norm::Layer | Norm::L2 | Norm::L2Clamped, _) => assert!(result.is_ok(), "{what}"),
                }
            }
        }
    }
}

/// The workspace must have the length that the backend requires for this problem; if it requires
/// none, any length is accepted.
#[test]
fn the_workspace_is_as_long_as_the_backend_says() {
    for (dweight, dbias) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut call = Call::full(Form::Backward);
        call = if dweight { call } else { call.without("dweight") };
        call = if dbias { call } else { call.without("dbias") };
        let needed = if dweight || dbias { WORKSPACE } else { 0 };
        for len in [0, WORKSPACE - 1, WORKSPACE, WORKSPACE + 1, 1 << 40] {
            call.set("workspace", |place| place.span = Span { allocation: 99, start: 0, len });
            let result = call.check(MIXES[0]);
            assert_eq!(result.is_ok(), len >= needed, "{len} for {needed}: {result:?}");
        }
    }
}

/// Reports and messages use these names.
#[test]
fn directions_have_names() {
    assert_eq!(Direction::ALL.map(Direction::name), ["forward", "backward", "quantized_forward"]);
}
