//! The functions of a program that follow from its pieces, `y = After(Affine(Statistic(Before(x))))`,
//! printed from the key. A schedule (a file with `main`) calls them and names no piece; a piece is a
//! file of `shaders/pieces/` with `put`, and `pull` for backward. Names that end in a number belong
//! to a norm: the next norm is norm 1.

use rmsnorm_spec::{Direction, Piece, PieceSet, Role, Slot, Tensor, TensorSet};

use super::accessors::suffix;
use super::substitute::substitute;
use super::{holds_gate, is_early_after, storage_of};
use crate::plan::{KernelKey, LATE, Program};

/// The pieces that the program has code for.
pub(super) fn pieces(key: &KernelKey) -> PieceSet {
    key.call.pieces(key.program.info().direction).set(Piece::Quantize, key.program.writes_codes())
}

/// The pieces of a slot, in the order of computation.
fn of_slot(key: &KernelKey, slot: Slot) -> Vec<Piece> {
    pieces(key).iter().filter(|piece| piece.slot() == slot).collect()
}

/// The result of a piece whose file has `put` from a pair to a pair, in the direction of the call.
fn put(key: &KernelKey, piece: Piece, pair: String) -> String {
    match (piece, key.program.info().direction) {
        (Piece::Residual, Direction::Forward | Direction::QuantizedForward) => {
            format!("residual_put({pair}, held.residual)")
        }
        // Backward reads the sum.
        (Piece::Residual, Direction::Backward) => pair,
        (Piece::GateBefore, _) => format!("gate_put({pair}, held.gate)"),
        (Piece::WeightFirst, Direction::Forward | Direction::QuantizedForward) => {
            format!("weight_first_put({pair}, held.weight)")
        }
        (Piece::WeightFirst, Direction::Backward) => format!("weight_first_put({pair}, weight)"),
        (Piece::GateAfter, _) if holds_gate(key) => format!("gate_after_put({pair}, h.gate)"),
        (Piece::GateAfter, _) => format!("gate_after_put({pair}, held.gate)"),
        (Piece::Parts | Piece::ResidualAfter | Piece::NextNorm | Piece::Quantize, _) => pair,
    }
}

/// The gradients of a piece's input and of a matrix of its own, from the gradient of its result.
fn pull(key: &KernelKey, piece: Piece, gradient: String) -> [String; 2] {
    let has = |tensor: Tensor| key.call.tensors.has(tensor);
    let of_gate = |values: &str| {
        [format!("gate_put({gradient}, held.gate)"), format!("gate_pull({gradient}, {values}, held.gate)")]
    };
    let pulled = match piece {
        Piece::GateBefore => return of_gate("pair_R(held.x)"),
        Piece::WeightFirst => format!("weighted({gradient}, weight)"),
        // A place that the compiler does not know keeps the bias out of registers.
        Piece::GateAfter => {
            return of_gate(&result(key, 0, "terms.x_hat", "load_bias_0(thread + row * params.zero, k)"));
        }
        Piece::Residual if has(Tensor::DresidualOut) => format!("residual_pull({gradient}, held.dresidual_out)"),
        Piece::Parts | Piece::Residual | Piece::ResidualAfter | Piece::NextNorm | Piece::Quantize => gradient,
    };
    [pulled.clone(), pulled]
}

/// The weighted and biased values of a norm, from its normalized ones. A weight before the norm has
/// been in these.
fn result(key: &KernelKey, n: u32, x_hat: &str, bias_of: &str) -> String {
    let [weight, bias, ..] = parameters(n).map(|tensor| key.call.tensors.has(tensor));
    let weighted = if weight && !pieces(key).has(Piece::WeightFirst) {
        format!("weighted({x_hat}, weight)")
    } else {
        x_hat.to_owned()
    };
    if bias { format!("biased({weighted}, {bias_of})") } else { weighted }
}

/// The normalized tensor of backward, from what is held: `NORMALIZED` in `gradients.wgsl`.
pub(super) fn normalized(key: &KernelKey) -> String {
    of_slot(key, Slot::Before).into_iter().fold("pair_R(held.x)".to_owned(), |x, piece| put(key, piece, x))
}

/// Number of norms.
pub(super) fn norms(key: &KernelKey) -> u32 {
    1 + u32::from(pieces(key).has(Piece::NextNorm))
}

pub(super) fn chains(key: &KernelKey) -> String {
    match (key.program, key.program.info().direction) {
        (Program::TransposeCodes | Program::TensorScale | Program::Clear | Program::Copy, _) => String::new(),
        (Program::ReducePartials, _) => gradients(key),
        (_, Direction::Backward) => held(key) + &load_parameters(key, 0) + &stored_statistics(key) + &backward(key),
        (_, Direction::Forward | Direction::QuantizedForward) => {
            let norms = (0..norms(key)).map(|n| load_parameters(key, n) + &norm(key, n));
            let norms = norms.chain((key.program == Program::Columnwise).then(|| stored_statistics(key)));
            held(key) + &before(key) + &norms.collect::<String>()
        }
    }
}

/// A matrix of which a thread holds its part until the sums over the row are made, and the tensor
/// that it is loaded from: in place an input is read from its output.
struct Held {
    tensor: Tensor,
    from: Tensor,
    /// Whether it is loaded after the sums.
    is_late: bool,
}

/// The matrices that the call reads.
fn held_matrices(key: &KernelKey) -> Vec<Held> {
    let direction = key.program.info().direction;
    let is_after = |tensor| of_slot(key, Slot::After).iter().any(|piece| piece.tensors(direction).has(tensor));
    let held = |tensor: Tensor| {
        let overwritten = [(Tensor::X, Tensor::Y), (Tensor::Residual, Tensor::ResidualOut)];
        let is_overwritten = |input| input == tensor && (input != Tensor::X || key.call.tensors.is_in_place());
        let by = overwritten.into_iter().find_map(|(input, output)| is_overwritten(input).then_some(output));
        let from = [Some(tensor), by].into_iter().flatten().find(|from| key.call.tensors.has(*from))?;
        let is_late = match direction {
            Direction::Backward => LATE.has(tensor),
            Direction::Forward | Direction::QuantizedForward => is_after(tensor) && !is_early_after(key),
        };
        Some(Held { tensor, from, is_late })
    };
    direction.reads().intersection(TensorSet::MATRICES).iter().filter_map(held).collect()
}

/// The type of the held matrices, and their loads.
fn held(key: &KernelKey) -> String {
    let matrices = held_matrices(key);
    // A weight before the norm is loaded with x: its rounding branches.
    let is_first = pieces(key).has(Piece::WeightFirst) && key.program.info().direction != Direction::Backward;
    let list = |each: &dyn Fn(&Held) -> String, weight: &str| {
        let weight = is_first.then(|| weight.to_owned());
        matrices.iter().map(each).chain(weight).collect::<Vec<_>>().join(", ")
    };
    let kept = |held: &Held| format!("Kept_{}", suffix(storage_of(key, held.tensor)));
    let load = |held: &Held| format!("load_{}(row, thread, k)", held.from);
    let fields = list(&|held| format!("{}: {}", held.tensor, kept(held)), "weight: Kept_W");
    let early = |held: &Held| if held.is_late { format!("{}()", kept(held)) } else { load(held) };
    let early = list(&early, "load_weight_0(thread, k)");
    let late = |held: &Held| if held.is_late { load(held) } else { format!("held.{}", held.tensor) };
    let late = list(&late, "held.weight");
    substitute(HELD, &[("FIELDS", &fields), ("EARLY", &early), ("LATE", &late)])
}

const HELD: &str = "
struct Held_0 { FIELDS }
fn load_0(row: u32, thread: u32, k: u32) -> Held_0 { return Held_0(EARLY); }
fn load_late_0(held: Held_0, row: u32, thread: u32, k: u32) -> Held_0 { return Held_0(LATE); }
";

/// h, as stored, from the held matrices; and the later norms' h, which the norm before has put.
fn before(key: &KernelKey) -> String {
    // The residual that is normalized alone is its x.
    let (x, kept) = match key.call.form.is_cast() {
        true => ("pair_R(held.residual)", "held.residual"),
        false => ("pair_T(held.x)", "held.x"),
    };
    let made = of_slot(key, Slot::Before).into_iter().fold(x.to_owned(), |x, piece| put(key, piece, x));
    let role = if holds_gate(key) { "R" } else { "0" };
    let h = if made == x { kept.to_owned() } else { format!("settled_{role}(kept_{role}({made}))") };
    let h = if holds_gate(key) { format!("Kept_0({h}, held.gate)") } else { h };
    let mut text = substitute("\nfn h_0(held: Held_0) -> Kept_0 { return H; }\n", &[("H", &h)]);
    for n in 1..=norms(key) {
        // Only a program that streams reads it back.
        let is_read = key.program == Program::ForwardStreaming && n < norms(key);
        let load = if is_read { "load_residual_out(row, thread, k)" } else { "Held_N()" };
        text += &substitute(&substitute(SUM, &[("LOAD", load)]), &[("N", &n.to_string())]);
    }
    text
}

const SUM: &str = "
alias Held_N = Kept_N;
fn load_N(row: u32, thread: u32, k: u32) -> Held_N { return LOAD; }
fn load_late_N(held: Held_N, row: u32, thread: u32, k: u32) -> Held_N { return held; }
fn h_N(held: Held_N) -> Kept_N { return held; }
";

/// The weight, bias, mean and rstd of a norm.
const fn parameters(n: u32) -> [Tensor; 4] {
    match n {
        0 => [Tensor::Weight, Tensor::Bias, Tensor::Mean, Tensor::Rstd],
        _ => [Tensor::NextWeight, Tensor::NextBias, Tensor::NextMean, Tensor::NextRstd],
    }
}

fn load_parameters(key: &KernelKey, n: u32) -> String {
    let [weight, bias, _, _] = parameters(n).map(|tensor| match key.call.tensors.has(tensor) {
        true => format!("load_{tensor}(0u, thread, k)"),
        false => "Kept_W()".to_owned(),
    });
    substitute(PARAMETERS, &[("N", &n.to_string()), ("WEIGHT", &weight), ("BIAS", &bias)])
}

const PARAMETERS: &str = "
fn load_weight_N(thread: u32, k: u32) -> Kept_W { return WEIGHT; }
fn load_bias_N(thread: u32, k: u32) -> Kept_W { return BIAS; }
";

/// y of a norm, and its stores. `put` returns the next norm's h.
fn norm(key: &KernelKey, n: u32) -> String {
    let has = |tensor: Tensor| key.call.tensors.has(tensor);
    let [_, _, mean, rstd] = parameters(n);
    let after = of_slot(key, Slot::After).into_iter().filter(|_| n == 0);
    let put_after = |y: String| after.fold(y, |y, piece| put(key, piece, y));
    let y = result(key, n, "normalized(pair_N(h), statistics)", "bias");
    let called = "y_N(h, statistics, weight, bias)".to_owned();
    // Codes are made of y_0.
    let (y, put_y) = if key.program.writes_codes() { (put_after(y), called) } else { (y, put_after(called)) };
    let statistics =
        lines(&[(has(mean), "store_MEAN(row, statistics.mean);"), (has(rstd), "store_RSTD(row, statistics.rstd);")]);
    let statistics = substitute(&statistics, &[("MEAN", mean.name()), ("RSTD", rstd.name())]);
    let is_after = n == 0 && pieces(key).has(Piece::ResidualAfter);
    let stores = lines(&[
        (
            n == 0 && pieces(key).has(Piece::Residual) && has(Tensor::ResidualOut),
            if holds_gate(key) {
                "store_residual_out(row, thread, k, h.h);"
            } else {
                "store_residual_out(row, thread, k, h);"
            },
        ),
        (!key.program.writes_codes(), "let y = PUT;"),
        // If y is rounded already, this does not change it.
        (!is_after && has(Tensor::Y), "store_y(row, thread, k, kept_T(y));"),
        (has(Tensor::Codes), "store_codes(row, thread, k, codes);"),
        (is_after, "return residual_after_put(row, thread, k, y, held.residual);"),
        (!is_after && !key.program.writes_codes(), "return Kept_N1();"),
    ]);
    let put = if key.program.writes_codes() { PUT_CODES } else { PUT };
    let text = substitute(&[NORM, put].concat(), &[("Y", &y), ("STATISTICS", &statistics), ("STORES", &stores)]);
    let text = substitute(&text, &[("PUT", &put_y)]);
    substitute(&text, &[("N", &n.to_string()), ("N1", &(n + 1).to_string())])
}

/// The lines that a function has.
fn lines(lines: &[(bool, &str)]) -> String {
    lines.iter().filter(|(is_there, _)| *is_there).map(|(_, line)| format!("\n    {line}")).collect()
}

const NORM: &str = "
fn y_N(h: Kept_N, statistics: RowStatistics, weight: Kept_W, bias: Kept_W) -> Pair { return Y; }
fn store_statistics_N(row: u32, thread: u32, statistics: RowStatistics) {
    if (thread > 0u) { return; }STATISTICS
}
";
const PUT: &str = "
fn put_N(
    row: u32, thread: u32, k: u32, held: Held_N, h: Kept_N, statistics: RowStatistics, weight: Kept_W, bias: Kept_W
) -> Kept_N1 {STORES
}
";
const PUT_CODES: &str = "
fn put_N(row: u32, thread: u32, k: u32, h: Kept_N, y: Pair, codes: Kept_codes) {STORES
}
";

/// The statistics that forward has stored.
fn stored_statistics(key: &KernelKey) -> String {
    let mean = if key.call.tensors.has(Tensor::Mean) { "load_mean(row)" } else { "0.0" };
    format!("\nfn load_statistics(row: u32) -> RowStatistics {{ return RowStatistics({mean}, load_rstd(row)); }}\n")
}

/// The gradient of a slot's input and of its pieces' matrices, from the gradient of its result:
/// through its pieces from the last to the first.
fn pulled(key: &KernelKey, slot: Slot, gradient: &str) -> (String, Vec<(Tensor, String)>) {
    let (mut gradient, mut owned) = (gradient.to_owned(), Vec::new());
    for piece in of_slot(key, slot).into_iter().rev() {
        let [input, own] = pull(key, piece, gradient);
        let written = piece.tensors(Direction::Backward).intersection(Direction::Backward.writes());
        owned.extend(written.intersection(key.call.tensors).iter().map(|tensor| (tensor, own.clone())));
        gradient = input;
    }
    (gradient, owned)
}

/// Whether pieces after the norm have gradients to store: the counter `AFTER`.
pub(super) fn stores_after(key: &KernelKey) -> bool {
    !pulled(key, Slot::After, "").1.is_empty()
}

/// From the gradient of y to the gradients of the norm's inputs: the pieces after the norm, the
/// weight, and the pieces before the norm.
fn backward(key: &KernelKey) -> String {
    let has = |tensor: Tensor| key.call.tensors.has(tensor);
    let store = |(tensor, gradient): (Tensor, String)| {
        let role = if tensor.role(Direction::Backward) == Role::Residual { "R" } else { "T" };
        format!("\n    store_{tensor}(row, thread, k, kept_{role}({gradient}));")
    };
    let is_first = pieces(key).has(Piece::WeightFirst);
    let wdy = if has(Tensor::Weight) && !is_first { "weighted(dy, weight)" } else { "dy" };
    let terms = if is_first { "weight_first_terms(thread, k, dh, pair_R(held.x))" } else { "Pair()" };
    let ((dy, after), (dx, before)) = (pulled(key, Slot::After, "pair_T(held.dy)"), pulled(key, Slot::Before, "dx"));
    let of_x = has(Tensor::Dx).then(|| (Tensor::Dx, dx.clone()));
    let named = |(tensor, gradient)| (tensor, if gradient == dx { "pulled".to_owned() } else { gradient });
    let stores: String = of_x.into_iter().chain(before).map(named).map(store).collect();
    let text = substitute(BACKWARD, &[("DY", &dy), ("WDY", wdy), ("DX", &dx), ("STORES", &stores), ("TERMS", terms)]);
    if after.is_empty() {
        return text;
    }
    text + &substitute(STORE_AFTER, &[("STORES", &after.into_iter().map(store).collect::<String>())])
}

const BACKWARD: &str = "
fn pull_after(held: Held_0) -> Pair { return DY; }
fn pull_weight(dy: Pair, weight: Kept_W) -> Pair { return WDY; }
fn pull_before(row: u32, thread: u32, k: u32, held: Held_0, weight: Kept_W, dx: Pair) {
    let pulled = DX;STORES
}
fn terms_before(thread: u32, k: u32, held: Held_0, dh: Pair) -> Pair { return TERMS; }
";
const STORE_AFTER: &str = "
fn store_after(row: u32, thread: u32, k: u32, held: Held_0, terms: Terms, weight: Kept_W) {STORES
}
";

/// The store of a sum over rows: of the gradients of the call, by their index.
fn gradients(key: &KernelKey) -> String {
    let stores = key.call.tensors.iter().enumerate();
    let stores = stores.map(|(at, tensor)| format!("\n    if (gradient == {at}u) {{ store_{tensor}(col, sum); }}"));
    let stores: String = stores.collect();
    format!("\nfn store_gradient(gradient: u32, col: u32, sum: vec4<f32>) {{{stores}\n}}\n")
}
