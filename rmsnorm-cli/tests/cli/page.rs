//! Pages of the repository: docs/cli.md has the options that the program has, and tables of figures are made of committed results.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use rmsnorm_core::quant::{CodeType, QuantSpec, ScaleKind};
use rmsnorm_core::{
    Activation, AnyBackend, CastOrder, DType, Error, GradReduction, GradStore, Norm, NormBackend, NormSpec, Problem,
    ResidualPlacement, Task, Tensor, TensorSet,
};

use crate::support::Folder;

/// The long options in a text: two hyphens and a name that begins with a letter.
fn options(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    let is_option = |word: &&str| word.strip_prefix("--").is_some_and(|name| name.starts_with(char::is_alphabetic));
    words.filter(is_option).map(str::to_owned).collect()
}

/// The options that a help text lists. Each begins a line, after its short form if it has one.
fn listed(help: &str) -> BTreeSet<String> {
    let entries = help.lines().filter(|line| line.trim_start().starts_with('-'));
    let names = entries.filter_map(|line| line.split_whitespace().find(|word| word.starts_with("--")));
    names.filter(|name| *name != "--help").map(str::to_owned).collect()
}

/// The section of the page below `## \`TITLE\``.
fn section<'a>(page: &'a str, title: &str) -> &'a str {
    let heading = format!("\n## `{title}`\n");
    let (_, rest) = page.split_once(&heading).unwrap_or_else(|| panic!("docs/cli.md has no section {title:?}"));
    rest.split("\n## ").next().unwrap_or(rest)
}

#[test]
fn page_has_every_command_and_option_and_no_other() {
    // A packaged crate does not have the docs folder.
    let pages = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs"));
    if !pages.is_dir() {
        return;
    }
    let page = fs::read_to_string(pages.join("cli.md")).unwrap();
    let folder = Folder::new();
    let help = |args: &[&str]| folder.rmsnorm(args).stdout;
    let overview = help(&["--help"]);
    let (_, commands) = overview.split_once("Commands:\n").unwrap();
    let commands = commands.lines().take_while(|line| !line.is_empty());
    let commands: Vec<&str> =
        commands.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect();
    assert!(commands.len() >= 7, "{commands:?}");

    let mut known = BTreeSet::from(["--help".to_owned(), "--version".to_owned()]);
    let mut titles = BTreeSet::from(["rmsnorm".to_owned()]);
    for command in commands {
        let command = if command == "report" { &[command, "check"][..] } else { &[command] };
        let help = help(&[command, &["--help"]].concat());
        let (title, has) = (format!("rmsnorm {}", command.join(" ")), listed(&help));
        assert!(help.contains(&format!("Usage: {title} ")), "{help}");
        let rows = section(&page, &title).lines().filter(|line| line.starts_with("| `-"));
        let told: BTreeSet<String> = rows.flat_map(|line| options(line.split(" | ").next().unwrap_or(line))).collect();
        assert_eq!(told, has, "the table of {title:?} in docs/cli.md, and --help");
        known.extend(has);
        titles.insert(title);
    }
    let unknown: Vec<String> = options(&page).difference(&known).cloned().collect();
    assert!(unknown.is_empty(), "docs/cli.md names {unknown:?}, which no command has");
    let headings = page.lines().filter_map(|line| line.strip_prefix("## ")).map(|title| title.replace('`', ""));
    assert_eq!(headings.collect::<BTreeSet<_>>(), titles, "the sections of docs/cli.md, and the commands");
}

/// A table stands between the comment `<!-- rmsnorm compare --markdown .. -->`, which is the command that prints it, and `<!-- end -->`.
/// `UPDATE_EXPECT=1` writes the tables.
#[test]
fn tables_are_those_of_committed_results() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    if !root.join("docs").is_dir() {
        return;
    }
    let (folder, mut tables) = (Folder::new(), 0);
    for page in ["README.md", "docs/benchmarks.md", "docs/guide/fp8.md", "docs/guide/pytorch.md"] {
        let text = fs::read_to_string(root.join(page)).unwrap();
        let mut parts = text.split("<!-- rmsnorm ");
        let mut expected = parts.next().unwrap().to_owned();
        for part in parts {
            let (command, rest) = part.split_once(" -->\n").unwrap();
            let (_, rest) = rest.split_once("<!-- end -->\n").unwrap_or_else(|| panic!("{page}: {command}: no end"));
            let from_root = |word: &str| match word.strip_prefix("benches/") {
                Some(_) => root.join(word).to_str().unwrap().to_owned(),
                None => word.to_owned(),
            };
            let args: Vec<String> = command.split_whitespace().map(from_root).collect();
            let printed = folder.rmsnorm(&args.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(printed.code, Some(0), "{page}: {command}: {}", printed.stderr);
            let output = printed.stdout;
            expected += &format!("<!-- rmsnorm {command} -->\n{output}<!-- end -->\n{rest}");
            tables += 1;
        }
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::write(root.join(page), &expected).unwrap();
        }
        assert_eq!(
            text, expected,
            "{page}: write its tables with `UPDATE_EXPECT=1 cargo test -p rmsnorm-cli tables_are`"
        );
    }
    assert!(tables >= 2, "{tables}");
}

/// Prepares a call: what a backend lacks it answers with `Unsupported`.
struct Prepare<'p>(&'p Problem);

impl Task for Prepare<'_> {
    type Output = Result<(), Error>;

    fn run<B: NormBackend>(self, backend: &B) -> Self::Output {
        backend.prepare(self.0)
    }
}

/// A call for each row of the table of backends in docs/support.md that tells calls apart, by a part of the row's title.
fn calls_of_the_page() -> Vec<(&'static str, Problem)> {
    let forward = |tensors: &[Tensor]| Problem::forward(Norm::Rms, 32, 256, DType::F32, TensorSet::of(tensors));
    let backward = |grad_reduction, grad_store| {
        let problem =
            Problem::backward(Norm::Layer, 32, 256, DType::F32, TensorSet::of(&[Tensor::Weight, Tensor::Dweight]));
        Problem { grad_reduction, grad_store, ..problem }
    };
    let quantized = |scale, tensors: &[Tensor]| {
        let quant = QuantSpec::new(CodeType::E4m3, scale);
        Problem::quantized_forward(Norm::Rms, 128, 256, DType::F32, quant, TensorSet::of(tensors))
    };
    let after = forward(&[Tensor::Residual, Tensor::ResidualOut]);
    let block = ScaleKind::Block { cols: 128, is_power_of_two: false };
    vec![
        ("forward, backward, in place", forward(&[Tensor::Rstd])),
        ("residual before the norm", forward(&[Tensor::Residual, Tensor::ResidualOut])),
        ("residual after the norm: ", Problem { residual_placement: ResidualPlacement::After, ..after }),
        ("`CastOrder::BeforeWeight`", Problem { cast_order: CastOrder::BeforeWeight, ..forward(&[Tensor::Weight]) }),
        ("`CastOrder::WeightFirst`", Problem { cast_order: CastOrder::WeightFirst, ..forward(&[Tensor::Weight]) }),
        ("`CastOrder::RstdFirst`", Problem { cast_order: CastOrder::RstdFirst, ..forward(&[Tensor::Weight]) }),
        ("E4M3, E5M2, int8 output", quantized(ScaleKind::Row, &[])),
        (
            "codes along columns too",
            quantized(block, &[Tensor::Rstd, Tensor::CodesColumnwise, Tensor::ScalesColumnwise]),
        ),
        ("sum of several addends", Problem { parts: 3, ..forward(&[]) }),
        (
            "a gate before or after",
            Problem {
                gate: NormSpec::rms(32, 256, 1e-5).gate_after(Activation::Silu).gate,
                ..forward(&[Tensor::Gate])
            },
        ),
        ("groups of columns", Problem { groups: 4, ..forward(&[]) }),
        ("as f32 sums", backward(GradReduction::Partials, GradStore::Accumulated)),
        ("by `Partials`", backward(GradReduction::Partials, GradStore::default())),
        ("by `Atomics`", backward(GradReduction::Atomics, GradStore::default())),
        ("by `Locks`", backward(GradReduction::Locks { groups: 2 }, GradStore::default())),
    ]
}

#[test]
fn page_of_support_says_what_backends_have() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/support.md"));
    let Ok(page) = fs::read_to_string(path) else { return };
    let (_, table) = page.split_once("| RMSNorm and LayerNorm |").unwrap();
    let (head, table) = table.split_once('\n').unwrap();
    let names: Vec<&str> = head.split('|').map(str::trim).filter(|name| !name.is_empty()).collect();
    assert_eq!(names, ["cpu", "cuda", "wgpu"]);
    for (column, name) in names.iter().enumerate() {
        let backend = match AnyBackend::open(name.parse().unwrap()) {
            Ok(backend) => backend,
            Err(reason) => {
                println!("skipped: {name}: {reason}");
                continue;
            }
        };
        for (title, problem) in calls_of_the_page() {
            let row = table.lines().take_while(|line| !line.is_empty()).find(|line| line.contains(title));
            let cells: Vec<&str> = row.unwrap_or_else(|| panic!("no row {title:?}")).split(" | ").collect();
            let says = cells[1 + column].trim_end_matches([' ', '|']);
            let answer = backend.dispatch(Prepare(&problem));
            match (says == "no", &answer) {
                (true, Err(Error::Unsupported { .. })) | (false, Ok(())) => {}
                _ => panic!("docs/support.md says {says:?} of {title:?} on {name}, the backend answers {answer:?}"),
            }
        }
    }
}
