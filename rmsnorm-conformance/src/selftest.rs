//! The proof that the suite can fail: every planted bug must be caught, and the correct simulated
//! backend must pass.
//!
//! It runs the suite's trials on small cases, against a simulated backend with one bug at a time,
//! until one case fails. If a check, a family or a bound is weakened, a bug survives.

#[cfg(test)]
pub(crate) mod faulty;
pub mod planted;
pub mod simulate;

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt;
use std::ops::ControlFlow;

use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
use rmsnorm_spec::reference::{self, BackwardInputs, ForwardInputs};
use rmsnorm_spec::{CastOrder, DType, DTypes, Norm, NormSpec, Tensor, TensorSet};

use crate::case::Family;
use crate::case::{Case, Kind, Layout, Trial, quantized};
use crate::finding::{Check, Finding, Status};
use crate::pieces::{self, quantize};
use crate::report::CaseReport;
use crate::run::calls::Context;
use crate::run::execute::execute_case;
use crate::run::harness::Harness;
use crate::run::workers;
use crate::selftest::planted::Bug;
use crate::selftest::simulate::SimulatedBackend;

/// A planted bug and the first check that caught it.
#[derive(Clone, Debug)]
pub struct Caught {
    /// The bug.
    pub bug: Bug,
    /// The norm it was planted in.
    pub norm: Norm,
    /// The kind of call it was planted in.
    pub kind: Kind,
    /// The finding of the check.
    pub finding: Finding,
    /// The case that replays it.
    pub case: String,
}

/// The result of the self-test. `Display` prints a table of bugs and the checks that caught them.
#[derive(Clone, Debug, Default)]
pub struct SelfTest {
    /// Number of places in which bugs were planted. Each bug is planted in every norm and kind of
    /// call it applies to.
    pub planted: usize,
    /// Number of places in which a bug was caught.
    pub caught: usize,
    /// The caught bugs.
    pub rows: Vec<Caught>,
    /// Bugs that passed every case.
    pub survivors: Vec<(Bug, Norm, Kind)>,
    /// Cases that the correct backend failed, and hand-computed results that differ from the
    /// reference.
    pub false_alarms: Vec<String>,
}

impl SelfTest {
    /// Whether every bug was caught, and nothing correct was rejected.
    pub fn is_success(&self) -> bool {
        self.planted > 0 && self.caught == self.planted && self.false_alarms.is_empty()
    }

    /// Number of different bugs, each planted in one or more places.
    pub fn bugs(&self) -> usize {
        let caught = self.rows.iter().map(|row| row.bug);
        let survived = self.survivors.iter().map(|(bug, ..)| *bug);
        caught.chain(survived).map(|bug| bug.to_string()).collect::<BTreeSet<String>>().len()
    }

    /// The counts in a few words: `4 bugs planted in 9 places, all caught`.
    pub fn counts(&self) -> String {
        let caught = if self.caught == self.planted { "all".into() } else { format!("{} of them", self.caught) };
        format!("{} bugs planted in {} places, {caught} caught", self.bugs(), self.planted)
    }
}

/// Plants every bug in every norm and kind of call it applies to, on `threads` threads.
pub fn self_test(threads: usize) -> SelfTest {
    let mut result = SelfTest { false_alarms: hand_computed(), ..SelfTest::default() };
    let kinds = Norm::ALL.into_iter().flat_map(|norm| Kind::first_calls().map(move |kind| (norm, kind)));
    let ControlFlow::<Infallible>::Continue(()) = workers::in_order(
        kinds.collect(),
        threads,
        |(norm, kind)| planted_in(norm, kind),
        |of_kind| {
            result.planted += of_kind.planted;
            result.caught += of_kind.caught;
            result.rows.extend(of_kind.rows);
            result.survivors.extend(of_kind.survivors);
            result.false_alarms.extend(of_kind.false_alarms);
            ControlFlow::Continue(())
        },
    );
    result
}

/// The self-test of one norm and kind of call.
fn planted_in(norm: Norm, kind: Kind) -> SelfTest {
    let (mut result, cases) = (SelfTest::default(), cases(norm, kind));
    for case in &cases {
        let report = simulate(None, case);
        if report.status != Status::Pass {
            result.false_alarms.push(format!("{}: {:?}", report.id, report.status));
        }
    }
    for bug in pieces::bugs().filter(|bug| bug.applies_to(norm, kind)) {
        result.planted += 1;
        match catch(bug, &cases) {
            Some((finding, case)) => {
                result.caught += 1;
                result.rows.push(Caught { bug, norm, kind, finding, case });
            }
            None => result.survivors.push((bug, norm, kind)),
        }
    }
    result
}

fn catch(bug: Bug, cases: &[Case]) -> Option<(Finding, String)> {
    cases.iter().find_map(|case| match simulate(Some(bug), case) {
        CaseReport { status: Status::Fail(finding), id, .. } => Some((finding, id)),
        CaseReport { .. } => None,
    })
}

fn simulate(bug: Option<Bug>, case: &Case) -> CaseReport {
    let backend = SimulatedBackend::new(bug);
    let arithmetic = backend.arithmetic();
    execute_case(Context { device: &backend, arithmetic: &arithmetic }, case)
}

/// Small cases, in the order of how many bugs they catch.
fn cases(norm: Norm, kind: Kind) -> Vec<Case> {
    use Tensor::{Bias, Dbias, Dresidual, DresidualOut, Dweight, Mean, Residual, ResidualOut, Rstd, Weight, Workspace};
    use Tensor::{NextBias, NextMean, NextRstd, NextWeight, Y};
    let present = TensorSet::of(&[Weight, Bias, Mean, Rstd, Dweight, Dbias]);
    let residual = present.union(TensorSet::of(&[Residual, ResidualOut, DresidualOut, Dresidual, Workspace]));
    // A bias would hide a small product.
    let bare = present.without(Bias);
    let next = TensorSet::of(&[Y, NextWeight, NextBias, NextMean, NextRstd]);
    let (present, residual, bare) = match kind.is_after() {
        true => (present.union(next), residual.union(next), bare.union(next).without(NextBias)),
        false => (present, residual, bare),
    };
    let plain = |dtype, rows, cols| Case { present, ..Case::plain(kind, norm, dtype, rows, cols) };
    let full = |dtype, rows, cols| Case { present: residual, weight_offset: 1.0, ..plain(dtype, rows, cols) };
    let strided = Layout::Uniform { pad: 3, offset: 1 };
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::Bf16);
    let trial = |trial, case: Case| Case { trial, ..case };
    if kind.gate().is_some() {
        return of_pieces(norm, kind).collect();
    }
    if kind.is_quantized() {
        return of_pieces(norm, kind).chain(quantized_cases(norm)).collect();
    }
    let mut cases: Vec<Case> = of_pieces(norm, kind).collect();
    cases.extend([
        plain(f32, 5, 33),
        full(bf16, 5, 33),
        Case { layout: strided, ..full(f32, 3, 13) },
        Case { layout: Layout::Mixed(3), ..full(f16, 3, 13) },
        Case { layout: Layout::Mixed(4), ..full(f32, 3, 13) },
        Case { layout: Layout::Grouped { rows: 2, seed: 1 }, ..full(f32, 5, 13) },
        Case { layout: Layout::Grouped { rows: 3, seed: 2 }, ..full(bf16, 7, 13) },
        Case { family: Family::NearEps, ..plain(f32, 3, 13) },
        Case { family: Family::NearEps, eps: 1e-6, ..plain(f16, 3, 13) },
        Case { family: Family::Nonfinite, ..plain(f32, 11, 13) },
        Case { family: Family::PosDy, ..plain(bf16, 300, 5) },
        Case { family: Family::PosDy, ..plain(f32, 300, 5) },
        Case { family: Family::CorrDy, ..plain(bf16, 9, 65) },
        Case { family: Family::ShiftedHi, ..plain(f32, 3, 257) },
        Case { family: Family::Subnormal, eps: 0.1, present: bare, ..plain(f16, 3, 65) },
        Case { family: Family::Large, ..plain(f16, 9, 257) },
        Case { cast_order: CastOrder::BeforeWeight, ..full(bf16, 9, 257) },
        Case { cast_order: CastOrder::BeforeWeight, ..plain(f16, 9, 257) },
        Case { dtypes: DTypes::uniform(bf16).widened(true, true), ..full(bf16, 29, 129) },
        plain(f32, 0, 5),
        full(f16, 64, 128),
        plain(bf16, 17, 541),
        trial(Trial::Determinism { repeats: 3 }, full(f32, 9, 257)),
        trial(Trial::Determinism { repeats: 3 }, plain(f32, 70, 129)),
    ]);
    for family in Family::ALL {
        for dtype in DType::ALL {
            cases.push(Case { family, eps: 1e-6, ..full(dtype, 13, 100) });
        }
    }
    cases.into_iter().map(Case::normalized).collect()
}

/// The small cases of the pieces: of gates, which have no others; of groups of columns; of rare
/// cast orders; of parts, because two are too few for some bugs, and of tensors that bring a piece.
fn of_pieces(norm: Norm, kind: Kind) -> impl Iterator<Item = Case> {
    let is_of = move |case: &Case| {
        let is_small = case.trial == Trial::Bounds && case.rows > 0 && case.rows * case.cols < 1 << 13;
        let is_rare =
            !Norm::USUAL.contains(&norm) || !matches!(case.cast_order, CastOrder::AtStore | CastOrder::BeforeWeight);
        let has_some =
            is_rare || case.groups > 1 || kind.has_parts() || kind.gate().is_some() || Kind::BEFORE.contains(&kind);
        is_small && case.norm == norm && case.kind == kind && has_some
    };
    pieces::lists().flat_map(|lists| (lists.smoke)()).filter(is_of)
}

/// Small cases with quantized results.
fn quantized_cases(norm: Norm) -> Vec<Case> {
    let lists = [quantize::smoke(), quantize::drawn(5, 60), quantize::columnwise(6, 2, 1 << 11)].concat();
    // RMS norm has exact ties. Layer norm has some in 16 bits.
    let mut cases: Vec<Case> = lists.into_iter().filter(|case| case.norm == norm && case.rows > 0).collect();
    let plain = |scale, codes, dtype, cols| {
        let quant = Some(QuantSpec::new(codes, scale));
        Case { quant, ..Case::plain(Kind::QUANTIZED_FORWARD, norm, dtype, 3, cols) }
    };
    let zeros = |scale| Case { family: Family::Zeros, ..plain(scale, CodeType::E4m3, DType::Bf16, 64) };
    let nonfinite = |scale| {
        let present = TensorSet::of(&[Tensor::Amax]);
        Case { family: Family::Nonfinite, present, rows: 7, ..plain(scale, CodeType::E5m2, DType::F32, 40) }
    };
    cases.extend(quantized::SCALES.map(zeros).into_iter().chain(quantized::SCALES.map(nonfinite)));
    // With several seeds, some case has its largest magnitude in the last row.
    cases.extend((1..9).map(|seed| Case { seed, ..plain(ScaleKind::Current, CodeType::E4m3, DType::F32, 40) }));
    cases.into_iter().map(Case::normalized).collect()
}

/// Compares the reference with five results computed by hand; returns one line per difference.
fn hand_computed() -> Vec<String> {
    let mut wrong = Vec::new();
    let mut expect = |what: &str, got: &[f64], expected: &[f64]| {
        let close = |(got, expected): (&f64, &f64)| (got - expected).abs() <= 1e-15 * expected.abs().max(1.0);
        if got.len() != expected.len() || !got.iter().zip(expected).all(close) {
            wrong.push(format!("reference: {what} is {got:?}, by hand {expected:?}"));
        }
    };
    let forward = |spec: &NormSpec, x, weight, bias| {
        reference::forward(spec, &ForwardInputs { x, residual: None, weight: Some(weight), bias: Some(bias) })
    };
    // avg(x^2) = 24.5, plus eps 0.5 is 25: rstd = 1/5.
    let rms = NormSpec::rms(1, 2, 0.5).weight_offset(1.0);
    let out = forward(&rms, &[7.0, 0.0], &[1.0, 2.0], &[0.0, 3.0]);
    expect("rstd of (7, 0)", &out.rstd, &[0.2]);
    expect("y of (7, 0)", &out.y, &[2.8, 3.0]);
    // mean 3, variance 4, eps 0: rstd = 1/2, x_hat = (-1, 1).
    let layer = NormSpec::layer(1, 2, 0.0);
    let out = forward(&layer, &[1.0, 5.0], &[10.0, 10.0], &[1.0, 1.0]);
    expect("y of (1, 5)", &out.y, &[-9.0, 11.0]);

    let backward = |spec: &NormSpec, dy: &[f64], x: &[f64], mean: f64, rstd: f64| {
        let (weight, mean, rstd) = ([1.0, 1.0], [mean], [rstd]);
        let weight = Some(weight.as_slice());
        reference::backward(spec, &BackwardInputs { dy, x, weight, mean: &mean, rstd: &rstd, dresidual_out: None })
    };
    // x_hat = (1.4, 0), wdy = (2, 2): mean_wdy_xhat = 1.4, dx = (2 - 1.96, 2) / 5.
    let out = backward(&rms, &[1.0, 1.0], &[7.0, 0.0], 0.0, 0.2);
    expect("dx of RMS norm", &out.dx, &[0.008, 0.4]);
    // Two columns span the mean and x_hat, so dx is zero for any dy.
    let out = backward(&layer, &[3.0, -8.0], &[1.0, 5.0], 3.0, 0.5);
    expect("dx of layer norm", &out.dx, &[0.0, 0.0]);
    wrong
}

impl fmt::Display for SelfTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<28}{:<17}{:<18}{:<18}{:<14}case", "planted bug", "norm", "stage", "caught by", "in")?;
        for Caught { bug, norm, kind, finding, case } in &self.rows {
            let check = finding.check.name();
            writeln!(
                f,
                "{:<28}{:<17}{:<18}{check:<18}{:<14}{case}",
                bug.to_string(),
                norm.name(),
                kind.name(),
                finding.output
            )?;
        }
        for (bug, norm, kind) in &self.survivors {
            writeln!(f, "SURVIVED: {bug} in {} {}: {}", norm.name(), kind.name(), bug.description)?;
        }
        for alarm in &self.false_alarms {
            writeln!(f, "FALSE ALARM: {alarm}")?;
        }
        let checks: BTreeSet<Check> = self.rows.iter().map(|row| row.finding.check).collect();
        let checks: Vec<&str> = checks.into_iter().map(Check::name).collect();
        write!(f, "{}, by {}", self.counts(), checks.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selftest::planted::{BugList, NormBug};

    /// Usually a case of bounds catches a bug first. Each of the other trials must be able to catch
    /// one alone.
    #[test]
    fn each_trial_catches_a_bug_of_its_kind() {
        let plain = Case::plain(Kind::END_TO_END, Norm::Layer, DType::F32, 70, 129);
        let plain = Case { present: TensorSet::of(&[Tensor::Dweight]), ..plain }.normalized();
        let repeated = Case { trial: Trial::Determinism { repeats: 3 }, ..plain };
        let related = Case { trial: Trial::Metamorphic, ..plain };
        for (bug, case, check) in [
            (NormBug::Nondeterministic.bug(), repeated, Check::Repeat),
            (NormBug::BatchVariant.bug(), repeated, Check::BatchInvariance),
            (NormBug::EpsOutside.bug(), related, Check::Metamorphic),
            (NormBug::RowOff.bug(), related, Check::Metamorphic),
            (NormBug::DwAccumulate.bug(), plain, Check::Unwritten),
            (
                NormBug::GapOverwritten.bug(),
                Case { layout: Layout::Uniform { pad: 1, offset: 0 }, ..plain },
                Check::Padding,
            ),
        ] {
            let status = simulate(Some(bug), &case).status;
            assert!(matches!(&status, Status::Fail(finding) if finding.check == check), "{bug}: {status:?}");
        }
    }

    #[test]
    fn counts_tell_bugs_from_places() {
        let finding = Finding { check: Check::Bounds, output: "y", detail: String::new() };
        let row = |norm| Caught {
            bug: NormBug::EpsMissing.bug(),
            norm,
            kind: Kind::FORWARD,
            finding: finding.clone(),
            case: String::new(),
        };
        let rows = Norm::USUAL.map(row).into();
        let survivors = vec![(NormBug::RowOff.bug(), Norm::Rms, Kind::FORWARD)];
        let test = SelfTest { planted: 3, caught: 2, rows, survivors, ..SelfTest::default() };
        assert_eq!(test.counts(), "2 bugs planted in 3 places, 2 of them caught");
        let test = SelfTest { planted: 2, survivors: Vec::new(), ..test };
        assert_eq!(test.counts(), "1 bugs planted in 2 places, all caught");
    }

    #[test]
    fn hand_computed_results_are_those_of_the_reference() {
        assert_eq!(hand_computed(), Vec::<String>::new());
    }

    #[test]
    fn self_test_succeeds_only_if_all_is_caught_and_nothing_correct_is_rejected() {
        let good = SelfTest { planted: 3, caught: 3, ..SelfTest::default() };
        assert!(good.is_success());
        for bad in [
            SelfTest { caught: 2, ..good.clone() },
            SelfTest { planted: 0, caught: 0, ..good.clone() },
            SelfTest { false_alarms: vec!["a correct case".into()], ..good.clone() },
        ] {
            assert!(!bad.is_success(), "{bad:?}");
        }
    }
}
