//! Trials that need a second call instead of a reference: repetition, batch invariance, shares of
//! groups and metamorphic relations.

use rmsnorm_spec::quant::{ScaleKind, ScaleLayout};
use rmsnorm_spec::{DType, Norm, Tensor, TensorShape};

use crate::Arithmetic;
use crate::case::Case;
use crate::case::data;
use crate::finding::{Check, Finding, Status};
use crate::run::calls::{Context, Scenario, may_vary};
use crate::run::memory::{Outputs, Poison};

/// Makes the same call `repeats` times, with a call of another shape in between; then calls with
/// parts of its rows, and with shares of its groups of columns.
pub(crate) async fn run(context: Context<'_>, case: &Case, repeats: u32) -> Result<(), Status> {
    let scenario = Scenario::new(case);
    let first = repeat(context, &scenario, repeats).await?;
    batches(context, &scenario, &first).await?;
    shares(context, &scenario, &first).await
}

async fn repeat(context: Context<'_>, scenario: &Scenario, repeats: u32) -> Result<Outputs, Status> {
    let case = &scenario.case;
    let first = scenario.run(context, Poison::Nan).await?;
    let other = Scenario::new(&Case { rows: 3, cols: case.cols + 1, ..*case }.normalized());
    for repeat in 1..repeats {
        other.run(context, Poison::Huge).await?;
        let again = scenario.run(context, Poison::Huge).await?;
        // In the order of the calls, because several calls may have the same tensor.
        for ((tensor, bits), (_, again)) in first.tensors.iter().zip(&again.tensors) {
            if bits != again && !may_vary(case, *tensor) {
                let index = first_difference(&bits.bits, &again.bits);
                let detail = format!("call {} gave different bits at element {index}", repeat + 1);
                return Err(violated(Check::Repeat, *tensor, detail));
            }
        }
    }
    Ok(first)
}

fn first_difference(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).position(|(a, b)| a != b).unwrap_or_default()
}

/// Layout and alignment stay as in the full batch; only the number of rows changes.
async fn batches(context: Context<'_>, scenario: &Scenario, whole: &Outputs) -> Result<(), Status> {
    let rows = scenario.case.rows;
    if rows == 0 {
        return Ok(());
    }
    let single = [vec![0], vec![rows / 2], vec![rows - 1]];
    let several =
        [2, 7, 64, 255, 256, 257].into_iter().filter(|&count| count < rows).map(|n| (rows - n..rows).collect());
    for part in single.into_iter().chain(several) {
        let alone = scenario.with_rows(&part).run(context, Poison::Nan).await?;
        for ((tensor, bits), (_, whole)) in alone.tensors.iter().zip(&whole.tensors) {
            let Some(width) = row_width(*tensor, &scenario.case) else { continue };
            let in_batch = data::pick_rows(&whole.bits, &part, width);
            if bits.bits != in_batch {
                let index = first_difference(&bits.bits, &in_batch);
                let (row, count) = (part[index / width], part.len());
                let detail = format!("row {row} has different bits in a batch of {count} rows than in one of {rows}");
                return Err(violated(Check::BatchInvariance, *tensor, detail));
            }
        }
    }
    Ok(())
}

/// Ranks that have whole groups of columns, as under tensor parallelism, have the bits of one device
/// that has all groups: two ranks, and one for each group. Open are sums over the rows, whose order
/// follows from the size of the call, and codes, whose scale may be that of a whole row.
async fn shares(context: Context<'_>, scenario: &Scenario, whole: &Outputs) -> Result<(), Status> {
    let case = &scenario.case;
    let of = |ranks: usize| (0..ranks).map(move |rank| rank * case.groups / ranks..(rank + 1) * case.groups / ranks);
    if case.groups == 1 || case.quant.is_some() {
        return Ok(());
    }
    for share in of(2).chain(of(case.groups)) {
        let alone = scenario.with_groups(&share).run(context, Poison::Nan).await?;
        for ((tensor, bits), (_, whole)) in alone.tensors.iter().zip(&whole.tensors) {
            let picked = data::pick_groups(&whole.bits, *tensor, &share, case);
            let Some(expected) = picked.filter(|_| tensor.shape() != TensorShape::Cols) else { continue };
            if bits.bits != expected {
                let index = first_difference(&bits.bits, &expected);
                let detail = format!("groups {share:?} of {} alone: element {index} has different bits", case.groups);
                return Err(violated(Check::GroupInvariance, *tensor, detail));
            }
        }
    }
    Ok(())
}

/// Elements of an output that belong to one row. `None` if an element depends on several rows, or
/// if rows are not contiguous.
fn row_width(tensor: Tensor, case: &Case) -> Option<usize> {
    let quant = case.quant.as_ref();
    match tensor.shape() {
        // All quantized values share the scale.
        TensorShape::Matrix if tensor == Tensor::Codes => {
            quant.filter(|quant| quant.scale != ScaleKind::Current).map(|_| case.cols)
        }
        TensorShape::Matrix => Some(case.cols),
        TensorShape::Rows => Some(case.groups),
        TensorShape::Scales => {
            quant.filter(|quant| quant.layout == ScaleLayout::RowMajor).and_then(|quant| quant.scale.groups(case.cols))
        }
        TensorShape::Cols
        | TensorShape::Workspace
        | TensorShape::One
        | TensorShape::Transposed
        | TensorShape::ScalesColumnwise => None,
    }
}

/// Checks relations between two calls that a deterministic kernel satisfies bit for bit. Negation
/// is exact, and so is scaling by powers of two if nothing underflows. A row does not depend on its
/// place in the batch. The case is an end-to-end case.
pub(crate) async fn run_metamorphic(context: Context<'_>, case: &Case) -> Result<(), Status> {
    let scenario = Scenario::new(case);
    // Scaling by powers of two is exact only without underflow, which f16 cannot guarantee.
    let scales = is_ieee(context.arithmetic) && case.dtypes.activation != DType::F16;
    let relations = if scales { &[NEGATED_X, DOUBLED_X, DOUBLED_DY][..] } else { &[NEGATED_X] };
    permute_rows(context, &scenario).await?;
    for relation in relations {
        relate(context, &scenario, relation).await?;
    }
    Ok(())
}

fn is_ieee(arithmetic: &Arithmetic) -> bool {
    let ieee = Arithmetic::IEEE;
    arithmetic.unit_roundoff == ieee.unit_roundoff
        && arithmetic.rstd_error <= ieee.rstd_error
        && !arithmetic.flushes_subnormals
}

/// A relation between a call and the same call with `scaled` times `factor`.
struct Relation {
    name: &'static str,
    /// A tensor that is left out, because it is not scaled.
    without: Option<Tensor>,
    scaled: [Tensor; 2],
    factor: f64,
    eps_factor: f32,
    /// The factors of [`SCALED`].
    factors: [f64; SCALED.len()],
}

/// The outputs of relations.
const SCALED: [Tensor; 8] = {
    use Tensor::{Dbias, Dresidual, Dweight, Dx, Mean, ResidualOut, Rstd, Y};
    [Y, ResidualOut, Mean, Rstd, Dx, Dresidual, Dweight, Dbias]
};

const NEGATED_X: Relation = Relation {
    name: "x -> -x",
    without: Some(Tensor::Bias),
    scaled: [Tensor::X, Tensor::Residual],
    factor: -1.0,
    eps_factor: 1.0,
    factors: [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 1.0],
};

const DOUBLED_X: Relation = Relation {
    name: "x -> 2x, eps -> 4 eps",
    // It would be added to dx.
    without: Some(Tensor::DresidualOut),
    factor: 2.0,
    eps_factor: 4.0,
    factors: [1.0, 2.0, 2.0, 0.5, 0.5, 0.5, 1.0, 1.0],
    ..NEGATED_X
};

const DOUBLED_DY: Relation = Relation {
    name: "dy -> 2 dy",
    without: None,
    scaled: [Tensor::Dy, Tensor::DresidualOut],
    eps_factor: 1.0,
    factors: [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0],
    ..DOUBLED_X
};

/// If the rows are reversed, the outputs per row are reversed.
async fn permute_rows(context: Context<'_>, scenario: &Scenario) -> Result<(), Status> {
    let case = &scenario.case;
    let reversed: Vec<usize> = (0..case.rows).rev().collect();
    let original = scenario.run(context, Poison::Nan).await?;
    for (tensor, bits) in &scenario.with_rows(&reversed).run(context, Poison::Nan).await?.tensors {
        let Some((width, original)) = row_width(*tensor, case).zip(original.get(*tensor)) else { continue };
        let expected = data::pick_rows(&original.bits, &reversed, width);
        if bits.bits != expected {
            let row = first_difference(&bits.bits, &expected) / width;
            return Err(violated(Check::Metamorphic, *tensor, format!("rows in reverse order: row {row} differs")));
        }
    }
    Ok(())
}

async fn relate(context: Context<'_>, scenario: &Scenario, relation: &Relation) -> Result<(), Status> {
    let Scenario { mut case, mut inputs } = scenario.clone();
    if let Some(without) = relation.without {
        case.present = case.present.without(without);
        inputs = inputs.with(without, None);
    }
    let scaled = |tensor: Tensor, values: &[f64]| {
        relation.scaled.contains(&tensor).then(|| values.iter().map(|value| value * relation.factor).collect())
    };
    let eps_factor = match case.norm {
        Norm::Rms | Norm::Layer | Norm::L2 => relation.eps_factor,
        // Its eps is compared with x itself.
        Norm::L2Clamped => relation.eps_factor.sqrt(),
    };
    let changed = Case { eps: case.eps * eps_factor, ..case };
    let changed = Scenario { case: changed, inputs: inputs.clone().map(scaled) };
    let before = Scenario { case, inputs }.run(context, Poison::Nan).await?;
    let after = changed.run(context, Poison::Nan).await?;
    for (tensor, factor) in SCALED.into_iter().zip(relation.factors).filter(|(tensor, _)| !may_vary(&case, *tensor)) {
        let Some((before, after)) = before.get(tensor).zip(after.get(tensor)) else { continue };
        // Compares values, not bits, so that both zeros are equal.
        let differs = |&i: &usize| before.value(i) * factor != after.value(i);
        if let Some(index) = (0..before.bits.len()).find(differs) {
            let (before, after) = (before.value(index), after.value(index));
            let detail = format!("{}: element {index} went from {before:e} to {after:e}", relation.name);
            return Err(violated(Check::Metamorphic, tensor, detail));
        }
    }
    Ok(())
}

fn violated(check: Check, tensor: Tensor, detail: String) -> Status {
    Status::Fail(Finding { check, output: tensor.name(), detail })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Kind, Trial};
    use crate::run::execute::execute_case;
    use crate::run::memory::Call;
    use crate::selftest::faulty::Faulty;
    use rmsnorm_spec::{DTypes, NormSpec};

    fn case(kind: Kind) -> Case {
        let mut case = Case::plain(kind, Norm::Rms, DType::Bf16, 9, 33);
        case.present = case.present.with(Tensor::Weight).with(Tensor::Dweight);
        case.normalized()
    }

    fn run(device: &Faulty, case: &Case, repeats: u32) -> Status {
        execute_case(device.context(), &Case { trial: Trial::Determinism { repeats }, ..*case }).status
    }

    fn metamorphic(device: &Faulty, case: &Case) -> Status {
        execute_case(device.context(), &Case { trial: Trial::Metamorphic, ..*case }).status
    }

    /// Flips the last bit of the first element of an output.
    fn spoil(call: &mut Call, tensor: Tensor) {
        for tensor in call.get_mut(tensor).into_iter() {
            let first = tensor.view.start;
            tensor.after[first] ^= 1;
        }
    }

    /// A fault that occurs once in many calls. Each call is preceded by one of another shape.
    #[test]
    fn last_of_many_repeats_counts() {
        for repeat in [1, 2, 6] {
            // The first call, then pairs: a call of the other shape, and the same call again.
            let fault = move |n, _: &NormSpec, call: &mut Call| {
                if n == 2 * repeat {
                    spoil(call, Tensor::Y)
                }
            };
            let status = run(&Faulty::new(fault), &case(Kind::FORWARD), 7);
            assert!(matches!(&status, Status::Fail(finding) if finding.check == Check::Repeat), "{repeat}: {status:?}");
        }
        assert_eq!(run(&Faulty::correct(), &case(Kind::FORWARD), 7), Status::Pass);
    }

    /// A row with different bits when it is alone: the first, the middle or the last of its batch.
    #[test]
    fn any_row_alone_must_have_its_bits() {
        let case = case(Kind::FORWARD);
        let inputs = Scenario::new(&case).inputs;
        let x = inputs.of(Tensor::X);
        for row in [0, 4, 8] {
            let first = crate::run::memory::encode(x[row * case.cols], DType::Bf16);
            let fault = move |_, spec: &NormSpec, call: &mut Call| {
                let is_row = call.get(Tensor::X).is_some_and(|x| x.before[x.view.start] == first);
                if spec.rows == 1 && is_row {
                    spoil(call, Tensor::Y);
                }
            };
            let status = run(&Faulty::new(fault), &case, 1);
            let is_found = matches!(&status, Status::Fail(finding) if finding.check == Check::BatchInvariance);
            assert!(is_found, "{row}: {status:?}");
        }
    }

    /// A group of columns with different bits where it is alone, or where it is one of two.
    #[test]
    fn any_share_of_the_groups_must_have_their_bits() {
        let grouped = |kind| {
            let mut case = Case { groups: 3, ..case(kind) };
            case.present = case.present.with(Tensor::Rstd);
            case.normalized()
        };
        for (tensor, kind) in
            [(Tensor::Y, Kind::FORWARD), (Tensor::Rstd, Kind::FORWARD), (Tensor::Dx, Kind::END_TO_END)]
        {
            let case = grouped(kind);
            assert_eq!(run(&Faulty::correct(), &case, 1), Status::Pass);
            for groups in [1, 2] {
                let fault = move |_, spec: &NormSpec, call: &mut Call| {
                    if spec.groups == groups {
                        spoil(call, tensor);
                    }
                };
                let status = run(&Faulty::new(fault), &case, 1);
                let is_found = matches!(&status, Status::Fail(finding) if finding.check == Check::GroupInvariance);
                assert!(is_found, "{tensor}, {groups}: {status:?}");
            }
        }
    }

    /// Every relation is checked in its dtypes: each is broken alone, in the second of its two
    /// calls.
    #[test]
    fn every_relation_between_calls_is_asked_for() {
        for (dtype, relations) in [(DType::F32, 4), (DType::Bf16, 4), (DType::F16, 2)] {
            let case = Case { dtypes: DTypes::uniform(dtype), ..case(Kind::END_TO_END) };
            let correct = Faulty::correct();
            assert_eq!(metamorphic(&correct, &case), Status::Pass);
            // A forward and a backward call for each side of a relation.
            assert_eq!(correct.calls(), 4 * relations, "{dtype}");
            for relation in 0..relations {
                let fault = move |n, _: &NormSpec, call: &mut Call| {
                    if n == 4 * relation + 3 {
                        spoil(call, Tensor::Dx);
                    }
                };
                let status = metamorphic(&Faulty::new(fault), &case);
                let is_found = matches!(&status, Status::Fail(finding) if finding.check == Check::Metamorphic);
                assert!(is_found, "{dtype}, relation {relation}: {status:?}");
            }
        }
    }
}
