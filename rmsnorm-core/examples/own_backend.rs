//! A custom backend under the conformance suite: plain loops over slices, in f64.
//!
//!     cargo run -p rmsnorm-core --features conformance --example own_backend

use std::ops::Range;

use rmsnorm_core::conformance::{Arithmetic, Harness, Options, run};
use rmsnorm_core::reference::{self, BackwardInputs, ForwardInputs, round_to};
use rmsnorm_core::{
    AnyCall, AnyElement, Backward, Checked, Element, Error, Forward, GradReduction, NormBackend, NormSpec, Piece,
    PieceSet, Problem, Rows, Source, Span, with_types,
};

/// Computes the definition in f64.
struct Loops;

impl NormBackend for Loops {
    type In<'a, T: AnyElement> = &'a [T];
    type Out<'a, T: AnyElement> = &'a mut [T];

    fn name(&self) -> &'static str {
        "loops"
    }

    fn in_span<T: AnyElement>(view: &&[T]) -> Span {
        Span::of(view)
    }

    fn out_span<T: AnyElement>(view: &&mut [T]) -> Span {
        Span::of(view)
    }

    fn workspace_len(&self, _: &Problem) -> usize {
        0
    }

    fn launch(&self, call: AnyCall<'_, '_, Self>) -> Result<(), Error> {
        let dtypes = call.problem().dtypes;
        match call {
            AnyCall::Forward(call) => with_types!(dtypes; T, W, R => forward(call.restore::<T, W, R>()?)),
            AnyCall::Backward(call) => with_types!(dtypes; T, W, R => backward(call.restore::<T, W, R>()?)),
            AnyCall::QuantizedForward(_)
            | AnyCall::PartialStatistics(_)
            | AnyCall::ForwardWithStatistics(_)
            | AnyCall::PartialBackwardStatistics(_)
            | AnyCall::BackwardWithStatistics(_) => Err(call.unsupported(self.name())),
        }
    }
}

fn forward<T: Element, W: Element, R: Element>(call: Checked<Forward<'_, Loops, T, W, R>>) -> Result<(), Error> {
    call.problem().require_one_group(Loops.name())?;
    call.problem().require_pieces(Loops.name(), PieceSet::of(&[Piece::Residual]))?;
    let (spec, args) = (*call.spec(), call.into_args());
    let ((x, mut y), residual) = match (args.x, args.residual) {
        (Some(x), residual) => (split(x, args.y, &spec), residual),
        // x has the dtype of the residual stream.
        (None, Some(Source::Read(x))) => ((matrix(&x, &spec), args.y), None),
        (None, Some(Source::Overwrite(_)) | None) => {
            return Err(Error::Missing { arg: "x", why: "a checked call has it" });
        }
    };
    let (residual, mut residual_out) = match residual {
        Some(source) => {
            let (values, out) = split(source, args.residual_out, &spec);
            (Some(values), out)
        }
        None => (None, None),
    };
    let (weight, bias) = (args.weight.map(values), args.bias.map(values));
    let inputs = ForwardInputs {
        x: &x,
        residual: residual.as_deref().map(|residual| (residual, R::DTYPE)),
        weight: weight.as_deref(),
        bias: bias.as_deref(),
    };
    let mut out = reference::forward(&spec, &inputs);
    if spec.cast_order.rounds_x_hat() {
        for (i, y) in out.y.iter_mut().enumerate() {
            let (row, col) = (i / spec.cols, i % spec.cols);
            let weight = reference::effective_weight(&spec, weight.as_deref(), col);
            let x_hat = match spec.cast_order.rounds_rstd() {
                true => (out.h[i] - out.mean[row]) * round_to(out.rstd[row], T::DTYPE),
                false => out.x_hat[i],
            };
            *y = round_to(x_hat, T::DTYPE) * weight + bias.as_ref().map_or(0.0, |bias| bias[col]);
        }
    }
    store(&mut y, &out.y, &spec);
    store(&mut residual_out, &out.h, &spec);
    store_vector(args.mean, &out.mean);
    store_vector(args.rstd, &out.rstd);
    Ok(())
}

fn backward<T: Element, W: Element, R: Element>(call: Checked<Backward<'_, Loops, T, W, R>>) -> Result<(), Error> {
    call.problem().require_one_group(Loops.name())?;
    call.problem().require_pieces(Loops.name(), PieceSet::of(&[Piece::Residual]))?;
    if call.problem().grad_reduction != GradReduction::Partials {
        return Err(Error::Unsupported { rule: "the loops have GradReduction::Partials only".into() });
    }
    let (spec, args) = (*call.spec(), call.into_args());
    let (dy, x) = (matrix(&args.dy, &spec), matrix(&args.x, &spec));
    let (weight, dresidual_out) = (args.weight.map(values), args.dresidual_out.map(|rows| matrix(&rows, &spec)));
    let mean = args.mean.map_or_else(|| vec![0.0; spec.rows], values);
    let inputs = BackwardInputs {
        dy: &dy,
        x: &x,
        weight: weight.as_deref(),
        mean: &mean,
        rstd: &values(args.rstd),
        dresidual_out: dresidual_out.as_deref(),
    };
    let out = reference::backward(&spec, &inputs);
    let mut dx = args.dx;
    store(&mut dx, &out.dx, &spec);
    // The same gradient in the residual stream's own dtype.
    let mut dresidual = args.dresidual;
    store(&mut dresidual, &out.dx, &spec);
    store_vector(args.dweight, &out.dweight);
    store_vector(args.dbias, &out.dbias);
    Ok(())
}

fn values<T: Element>(vector: &[T]) -> Vec<f64> {
    vector.iter().map(|value| f64::from(value.to_f32())).collect()
}

/// A matrix without the gaps between its rows.
fn matrix<T: Element>(rows: &Rows<&[T]>, spec: &NormSpec) -> Vec<f64> {
    let layout = rows.layout(spec.rows, spec.cols);
    (0..spec.rows).flat_map(|row| values(&rows.view[layout.start(row)..][..spec.cols])).collect()
}

/// The values of the source, and the destination of the result: in place the source itself,
/// otherwise `target`, if any.
fn split<'a, T: Element>(
    source: Source<&'a [T], &'a mut [T]>,
    target: Option<Rows<&'a mut [T]>>,
    spec: &NormSpec,
) -> (Vec<f64>, Option<Rows<&'a mut [T]>>) {
    match source {
        Source::Read(rows) => (matrix(&rows, spec), target),
        Source::Overwrite(rows) => {
            let layout = rows.layout(spec.rows, spec.cols);
            (matrix(&layout.rows(&*rows.view), spec), Some(rows))
        }
    }
}

fn store<T: Element>(target: &mut Option<Rows<&mut [T]>>, values: &[f64], spec: &NormSpec) {
    let Some(rows) = target else { return };
    let layout = rows.layout(spec.rows, spec.cols);
    for (row, values) in values.chunks(spec.cols).enumerate() {
        store_vector(Some(&mut rows.view[layout.start(row)..][..spec.cols]), values);
    }
}

/// Each value is rounded once.
fn store_vector<T: Element>(target: Option<&mut [T]>, values: &[f64]) {
    for (element, value) in target.into_iter().flatten().zip(values) {
        *element = T::from_f32(round_to(*value, T::DTYPE) as f32);
    }
}

/// The suite also needs functions that move data, and the guarantees of the arithmetic. f64 loops
/// exceed the guarantees of f32 with correct rounding.
impl Harness for Loops {
    type Backend = Loops;
    type Buffer<T: AnyElement> = Vec<T>;

    fn backend(&self) -> &Loops {
        self
    }

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::IEEE
    }

    fn device(&self) -> String {
        "f64 loops".into()
    }

    fn cols_breakpoints(&self) -> Vec<usize> {
        Vec::new()
    }

    fn rows_breakpoints(&self) -> Vec<usize> {
        Vec::new()
    }

    fn upload<T: AnyElement>(&self, data: &[T]) -> Result<Vec<T>, Error> {
        Ok(data.to_vec())
    }

    fn download<T: AnyElement>(&self, buffer: &Vec<T>) -> Result<Vec<T>, Error> {
        Ok(buffer.clone())
    }

    fn view<'a, T: AnyElement>(&self, buffer: &'a Vec<T>, range: Range<usize>) -> &'a [T] {
        &buffer[range]
    }

    fn view_mut<'a, T: AnyElement>(&self, buffer: &'a mut Vec<T>, range: Range<usize>) -> &'a mut [T] {
        &mut buffer[range]
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let summary = run(&Loops, &Options::default(), &mut |_, _| (), None)?;
    println!("{summary}");
    if summary.is_success() { Ok(()) } else { Err("the backend is not conformant".into()) }
}
