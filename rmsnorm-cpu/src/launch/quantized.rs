//! A quantized forward call: the forward stage, run twice if the tensor's scale must be computed
//! first, then the transposed and columnwise copies.

use std::sync::atomic::{AtomicU32, Ordering};

use rmsnorm_spec::quant::ScaleKind;
use rmsnorm_spec::{AnyOut, AnyQuantizedForward, Checked, Error, Norm, Scales};

use super::scales::{Compact, ScalesOut, scales_out};
use super::{
    SliceBackend, call_and_plan, fork, gate_of, input, matrix, matrix_mut, numbers, out, spread, starts, vectors,
};
use crate::backend::CpuBackend;
use crate::caps::Isa;
use crate::lanes::{LANES, Out};
use crate::plan::Plan;
use crate::stages::backward::Given;
use crate::stages::columnwise::ColumnwiseCols;
use crate::stages::forward::affine::Vectors;
use crate::stages::forward::before::{Before, Summed};
use crate::stages::forward::statistics::{Elsewhere, OfRow, Statistic};
use crate::stages::forward::{Rows, Saved};
use crate::stages::gate::{self, AfterNorm, Then};
use crate::stages::groups::Groups;
use crate::stages::quantized_forward::{Codes, Scaling};
use crate::stages::scaled::Scaled;
use crate::stages::transposed::TransposedCols;
use crate::stages::{Call, Matrix, MatrixMut, RowStarts, Section, Split};
use crate::{kernel, memory};

pub(super) fn quantized_forward<B: SliceBackend>(
    backend: &CpuBackend,
    call: Checked<AnyQuantizedForward<'_, B>>,
) -> Result<(), Error> {
    let (this, plan) = call_and_plan(backend, &call);
    let mut args = call.into_args();
    let (gate, spec) = (gate_of::<B>(args.gate.take(), &this.spec.groups(1))?, this.spec);
    let weight = args.weight.take_if(|_| spec.cast_order.is_weight_first()).map(numbers::<B>).transpose()?;
    let ([gate, gate_after], is_plain) = (gate::slots(gate), gate.is_none());
    let scaled = move |of| Scaled { of, gate, weight };
    match (spec.groups, weight) {
        (1, None) if is_plain => {
            quantized(backend, (this, plan), args, OfRow, |x, _| (x, (), None), |isa, work| kernel::mix(isa, work))
        }
        (1, None) => {
            let slots = |x, _| (scaled(x), gate_after, None);
            quantized(backend, (this, plan), args, OfRow, slots, |isa, work| kernel::any(isa, work))
        }
        // All statistics come before the first code, because sets that share a scale may lie in several groups. A weight
        // before the norm, which few models have, goes the same way, with one group.
        (groups, _) => {
            let len = |wanted: bool| if wanted { spec.rows * groups } else { 0 };
            let (mut mean, mut rstd) =
                (memory::zeros("mean", len(spec.norm == Norm::Layer))?, memory::zeros("rstd", len(true))?);
            let room = (&mut mean[..], &mut rstd[..]);
            let slots = |x, residual| {
                let x = scaled(x);
                let all = statistics(backend, plan.tasks, this, (x, residual), room);
                (x, Groups { all, groups, gate: gate_after }, Some(all))
            };
            quantized(backend, (this, plan), args, Elsewhere, slots, |isa, work| kernel::any(isa, work))
        }
    }
}

/// The statistics of every group of columns, in this room.
fn statistics<'s>(
    backend: &CpuBackend,
    tasks: usize,
    call: Call,
    (x, residual): (Scaled<'_>, Option<Matrix<'_>>),
    (mean, rstd): (&'s mut [f32], &'s mut [f32]),
) -> Given<'s> {
    let this = call.in_column_groups();
    let work = Rows {
        call: this,
        before: Summed {
            x: x.in_column_groups(&this),
            residual: residual.map(|residual| residual.in_column_groups(&this)),
            out: None,
        },
        statistic: OfRow,
        affine: Vectors { weight: None, bias: None },
        after: (),
        saved: Saved { mean: (!mean.is_empty()).then(|| Out::from(&mut *mean)), rstd: Some(Out::from(&mut *rstd)) },
    };
    spread(backend, tasks, call.spec.rows, work, kernel::any);
    Given { mean: (!mean.is_empty()).then_some(mean), rstd }
}

/// The stage of a quantized call.
type Work<'w, X, G, F> = Rows<'w, Summed<'w, X>, Then<G, Codes<'w>>, F>;

/// `slots` makes of x and the residual the slots before and after the norm, and the statistics if they are those of groups.
fn quantized<
    'a,
    'g,
    B: SliceBackend,
    X: Before + Copy + Send,
    G: AfterNorm + Copy + Send,
    F: Statistic + Copy + Send,
>(
    backend: &CpuBackend,
    (this, Plan { tasks, .. }): (Call, Plan),
    args: AnyQuantizedForward<'a, B>,
    statistic: F,
    slots: impl FnOnce(Matrix<'a>, Option<Matrix<'a>>) -> (X, G, Option<Given<'g>>),
    kernel: for<'w> fn(Isa, &mut Work<'w, X, G, F>),
) -> Result<(), Error> {
    // Rows are whole here: sets that share a scale may lie in several groups of columns.
    let (spec, quant, rows, cols) = (this.spec.groups(1), args.quant, this.spec.rows, this.spec.cols);
    let groups = quant.scale.groups(cols).unwrap_or(0);

    // Everything that may fail comes before the first write.
    let (amax, amax_out) = match args.amax {
        Some(amax) if quant.folds_amax => {
            let values = B::values(amax.typed::<f32>()?)?;
            // A magnitude: the sign is dropped.
            (AtomicU32::new(values[0].to_bits() & 0x7fff_ffff), Some(Out::from(values)))
        }
        Some(amax) => (AtomicU32::new(0), Some(out::<B, f32>(amax)?)),
        None => (AtomicU32::new(0), None),
    };
    let mut scales = args.scales.map(scales_out::<B>).transpose()?;
    let mut compact = Compact::new(&quant, rows * groups)?;

    let columns = match (args.codes_columnwise, args.scales_columnwise) {
        (Some(codes), Some(scales)) => {
            let groups = quant.scale.groups(rows).unwrap_or(0);
            let compact = Compact::new(&quant.columnwise(), cols * groups)?;
            let codes = MatrixMut { rows: RowStarts::of(codes.layout(cols, rows)), data: bytes::<B>(codes.view)? };
            Some(Columns { groups, compact, codes, scales: scales_out::<B>(scales)? })
        }
        (None, _) | (_, None) => None,
    };

    let mut codes = MatrixMut { rows: starts(&args.codes, &spec), data: bytes::<B>(args.codes.view)? };
    let residual = args.residual.map(|residual| matrix::<B>(residual, &spec)).transpose()?;
    let affine = vectors::<B>(args.weight, args.bias)?;
    let (x, gate, found) = slots(matrix::<B>(args.x, &spec)?, residual);
    let scaling = match (quant.scale, &mut scales) {
        (ScaleKind::Given, _) => {
            Scaling::Tensor(args.scale.map_or(Ok(f32::NAN), |scale| Ok(input::<B, f32>(scale)?[0]))?)
        }
        (ScaleKind::Current, Some(Scales::F32(scale))) => {
            let (codes, scaling) = (codes.reborrow(), Scaling::Unknown);
            let then = Codes { quant, codes, scaling, y: None, amax: Some(&amax), largest: [0.0; LANES] };
            let (before, saved) = (Summed { x, residual, out: None }, Saved::default());
            let work = Rows { call: this, before, statistic, affine, after: Then { gate, then }, saved };
            spread(backend, tasks, rows, work, kernel);
            let found = kernel::scale(&quant, f32::from_bits(amax.load(Ordering::Relaxed)));
            scale.set(0, found);
            Scaling::Tensor(found)
        }
        (_, Some(scales)) => compact.scaling(&quant, scales, groups),
        // A `Checked` call has scales unless the scale is given; the type system needs the error.
        (_, None) => {
            let why = "the codes cannot be decoded without it: pass scales(..) or scales_e8m0(..)";
            return Err(Error::Missing { arg: "scales", why });
        }
    };
    let residual_out = args.residual_out.map(|rows| matrix_mut::<B>(rows, &spec)).transpose()?;
    let mut mean = args.mean.map(out::<B, f32>).transpose()?;
    let mut rstd = args.rstd.map(out::<B, f32>).transpose()?;
    let then = Codes {
        quant,
        codes: codes.reborrow(),
        scaling,
        y: args.y.map(|y| matrix_mut::<B>(y, &spec)).transpose()?,
        amax: amax_out.is_some().then_some(&amax),
        largest: [0.0; LANES],
    };
    let mut saved = Saved { mean: mean.as_mut().map(Out::reborrow), rstd: rstd.as_mut().map(Out::reborrow) };
    if let Some(found) = found {
        for (to, values) in [(saved.mean.take(), found.mean), (saved.rstd.take(), Some(found.rstd))] {
            if let Some((mut to, values)) = to.zip(values) {
                to.copy_from_slice(values);
            }
        }
    }
    let before = Summed { x, residual, out: residual_out };
    let work = Rows { call: this, before, statistic, affine, after: Then { gate, then }, saved };
    spread(backend, tasks, rows, work, kernel);
    if let Some(mut out) = amax_out {
        out.set(0, f32::from_bits(amax.into_inner()));
    }
    if let Some(scales) = scales {
        compact.lay_out(&quant, scales, (rows, groups));
    }
    if let Some(codes_t) = args.codes_t {
        let codes_t = MatrixMut { rows: RowStarts::of(codes_t.layout(cols, rows)), data: bytes::<B>(codes_t.view)? };
        // SAFETY:
        // - contents: the stage above has written every code of every row, and only these are read;
        // - memory: nothing is written to it any more.
        let written = unsafe { codes.data.overwritten() };
        let work = TransposedCols {
            codes: written,
            codes_rows: codes.rows,
            rows,
            cols: Section { first: 0, len: cols },
            codes_t,
        };
        backend.install(tasks, || {
            fork(work, cols, tasks, &TransposedCols::split_at, &TransposedCols::run);
        });
    }
    // A `Checked` call with a columnwise copy stores rstd, and the mean in layer norm.
    if let Some((columns, rstd)) = columns.zip(rstd.as_ref()) {
        // SAFETY:
        // - contents: the stage above has written the statistics of every row;
        // - memory: nothing is written to them any more.
        let (mean, rstd) = unsafe { (mean.as_ref().map(|mean| mean.overwritten()), rstd.overwritten()) };
        let Columns { groups, mut compact, codes, mut scales } = columns;
        let quant = quant.columnwise();
        let scaling = compact.scaling(&quant, &mut scales, groups);
        let columns = Section { first: 0, len: cols };
        let work =
            ColumnwiseCols { call: this, x, residual, affine, gate, mean, rstd, cols: columns, quant, codes, scaling };
        spread(backend, tasks, cols, work, kernel::any);
        compact.lay_out(&quant, scales, (cols, groups));
    }
    Ok(())
}

/// Converts an output view of codes of any type.
fn bytes<B: SliceBackend>(view: AnyOut<'_, B>) -> Result<Out<'_, u8>, Error> {
    match view {
        AnyOut::E4m3(codes) => Ok(B::out(codes).cast()),
        AnyOut::E5m2(codes) => Ok(B::out(codes).cast()),
        AnyOut::Int8(_) | AnyOut::F32(_) | AnyOut::F16(_) | AnyOut::Bf16(_) | AnyOut::E8m0(_) => {
            out::<B, i8>(view).map(Out::cast)
        }
    }
}

/// The outputs of the columnwise copy.
struct Columns<'a> {
    /// Blocks per column.
    groups: usize,
    compact: Compact,
    codes: MatrixMut<'a, u8>,
    scales: ScalesOut<'a>,
}
