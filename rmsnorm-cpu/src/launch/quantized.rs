//! A quantized forward call: the forward stage, run twice if the tensor's scale must be computed
//! first, then the transposed and columnwise copies.

use std::sync::atomic::{AtomicU32, Ordering};

use rmsnorm_spec::quant::{QuantSpec, ScaleKind};
use rmsnorm_spec::{AnyOut, AnyQuantizedForward, Checked, Error, Scales};

use super::scales::{Compact, ScalesOut, scales_out};
use super::{SliceBackend, fork, input, matrix, matrix_mut, numbers, out, plan_here, spec_of, spread, starts};
use crate::backend::CpuBackend;
use crate::kernel;
use crate::lanes::{Out, Written};
use crate::plan::Plan;
use crate::stages::columnwise::ColumnwiseCols;
use crate::stages::forward::{ForwardRows, Residual};
use crate::stages::quantized_forward::{QuantizedRows, Scaling};
use crate::stages::transposed::TransposedCols;
use crate::stages::{MatrixMut, RowStarts};

pub(super) fn quantized_forward<B: SliceBackend>(
    backend: &CpuBackend,
    call: Checked<AnyQuantizedForward<'_, B>>,
) -> Result<(), Error> {
    let (spec, plan) = (spec_of(&call), plan_here(backend, call.problem()));
    let dtypes = call.problem().dtypes;
    let args = call.into_args();
    let (quant, rows, cols) = (args.quant, spec.rows, spec.cols);
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
    let inputs = ForwardRows {
        spec,
        dtypes,
        rows,
        streaming: plan.streaming,
        weight: args.weight.map(numbers::<B>).transpose()?,
        bias: args.bias.map(numbers::<B>).transpose()?,
        x: Some(matrix::<B>(args.x, &spec)?),
        y: None,
        residual: residual.map_or(Residual::Absent, Residual::Read),
        mean: None,
        rstd: None,
    };
    let along = inputs.of_inputs();
    let scaling = match (quant.scale, &mut scales) {
        (ScaleKind::Given, _) => {
            Scaling::Tensor(args.scale.map_or(Ok(f32::NAN), |scale| Ok(input::<B, f32>(scale)?[0]))?)
        }
        (ScaleKind::Current, Some(Scales::F32(scale))) => {
            let codes = MatrixMut { rows: codes.rows, data: Out::none(()) };
            let forward = inputs.of_inputs();
            let work = QuantizedRows { forward, quant, codes, scaling: Scaling::Unknown, amax: Some(&amax) };
            spread(backend, plan.tasks, rows, work, QuantizedRows::split_at, kernel::quantized_forward);
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
    let residual = match (residual, args.residual_out) {
        (None, _) => Residual::Absent,
        (Some(residual), None) => Residual::Read(residual),
        (Some(residual), Some(rows)) => Residual::ReadWrite(residual, matrix_mut::<B>(rows, &spec)?),
    };
    let mut mean = args.mean.map(out::<B, f32>).transpose()?;
    let mut rstd = args.rstd.map(out::<B, f32>).transpose()?;
    let forward = ForwardRows {
        y: args.y.map(|y| matrix_mut::<B>(y, &spec)).transpose()?,
        residual,
        mean: mean.as_mut().map(Out::reborrow),
        rstd: rstd.as_mut().map(Out::reborrow),
        ..inputs
    };
    let here = codes.reborrow();
    let asked = amax_out.is_some().then_some(&amax);
    let work = QuantizedRows { forward, quant, codes: here, scaling, amax: asked };
    spread(backend, plan.tasks, rows, work, QuantizedRows::split_at, kernel::quantized_forward);
    if let Some(mut out) = amax_out {
        out.set(0, f32::from_bits(amax.into_inner()));
    }
    if let Some(scales) = scales {
        compact.lay_out(&quant, scales, (rows, groups));
    }
    if let Some(codes_t) = args.codes_t {
        let codes_t = MatrixMut { rows: RowStarts::of(codes_t.layout(cols, rows)), data: bytes::<B>(codes_t.view)? };
        // SAFETY:
        // - contents: the stage above has written every code of every row, and only these are read.
        let written = unsafe { Written::new(&codes.data) };
        let work = TransposedCols { codes: written, codes_rows: codes.rows, rows, first: 0, cols, codes_t };
        backend.install(plan.tasks, || {
            fork(work, cols, plan.tasks, &TransposedCols::split_at, &TransposedCols::run);
        });
    }
    // A `Checked` call with a columnwise copy stores rstd, and the mean in layer norm.
    if let Some((columns, rstd)) = columns.zip(rstd.as_ref()) {
        // SAFETY:
        // - contents: the stage above has written the statistics of every row, and only these are
        //   read.
        let (mean, rstd) = unsafe { (mean.as_ref().map(|mean| Written::new(mean)), Written::new(rstd)) };
        columns.run(backend, along, (mean, rstd), (&quant.columnwise(), &plan));
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

impl Columns<'_> {
    /// Computes the copy from the inputs and the rows' statistics.
    fn run(
        self,
        backend: &CpuBackend,
        forward: ForwardRows<'_>,
        (mean, rstd): (Option<Written<'_, f32>>, Written<'_, f32>),
        (quant, plan): (&QuantSpec, &Plan),
    ) {
        let Columns { groups, mut compact, codes, mut scales } = self;
        let cols = forward.spec.cols;
        let scaling = compact.scaling(quant, &mut scales, groups);
        let work = ColumnwiseCols { forward, mean, rstd, first: 0, cols, quant: *quant, codes, scaling };
        spread(backend, plan.tasks, cols, work, ColumnwiseCols::split_at, kernel::columnwise);
        compact.lay_out(quant, scales, (cols, groups));
    }
}
