//! The compiled code of every tuned program, as `tests/code.txt` lists it: one line a program, with
//! its bytes of code, registers, bytes spilled, and a hash of the code. A change of kernel text
//! shows there what it does to each of them; `benches/code.py` compares two such files.
//!
//! `RMSNORM_SWEEP=all UPDATE_EXPECT=1 cargo test -p rmsnorm-cuda --lib programs` writes the file.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use std::{env, fs};

use super::*;
use crate::plan::ColumnGroups;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/code.txt");

/// Held while a test reads and writes the file.
static FILE: Mutex<()> = Mutex::new(());

fn head((major, minor): (u32, u32)) -> String {
    format!("# NVRTC {major}.{minor} for sm_90. program: bytes of code, registers, bytes spilled, hash")
}

/// The lines of the file after its head: what is listed of each program, by its name.
fn lines(text: &str) -> BTreeMap<&str, &str> {
    text.lines().skip(1).map(|line| line.split_once(": ").expect("a name, then numbers")).collect()
}

/// Compares these programs with their lines, or writes the lines if `UPDATE_EXPECT` is set.
pub(super) fn compare(nvrtc: &Nvrtc, outcomes: &[Outcome]) {
    let _guard = FILE.lock();
    let text = fs::read_to_string(PATH).unwrap_or_default();
    let (head, is_update) = (head(nvrtc.version()), env::var_os("UPDATE_EXPECT").is_some());
    if !is_update && text.lines().next() != Some(&head) {
        println!("skipped: {PATH} lists the code of another compiler than {head:?}");
        return;
    }
    // A program's line has the columns of the first call that has it, in whichever test it is.
    let all = all();
    let names: HashMap<_, _> = all.iter().map(|(name, job)| ((job.key, job.arch), name)).collect();
    let name = |job: &Job| names.get(&(job.key, job.arch)).expect("a program of the list").as_str();
    let found: Vec<_> = outcomes.iter().map(|outcome| (name(&outcome.job), outcome.listed())).collect();
    if is_update {
        let mut listed = lines(&text);
        listed.extend(found.iter().map(|(name, facts)| (*name, facts.as_str())));
        listed.retain(|name, _| all.contains_key(*name));
        let lines = listed.iter().map(|(name, facts)| format!("{name}: {facts}\n"));
        fs::write(PATH, format!("{head}\n{}", lines.collect::<String>())).expect("a file to write");
        return;
    }
    let listed = lines(&text);
    let is_other = |(name, facts): &&(&str, String)| listed.get(name) != Some(&facts.as_str());
    let others: Vec<_> = found.iter().filter(is_other).map(|(name, facts)| format!("{name}: {facts}")).collect();
    let (count, first) = (others.len(), others.iter().take(5).map(String::as_str).collect::<Vec<_>>().join("\n"));
    assert!(
        others.is_empty(),
        "{count} of {} programs have other code than {PATH} lists, which this test writes with UPDATE_EXPECT=1; now:\n{first}",
        found.len()
    );
}

/// All programs that have a line, by their names.
fn all() -> BTreeMap<String, Job> {
    let jobs = [tuned(), tuned_to_codes(), of_parts(), with_gates(), of_columns()].concat();
    #[cfg(feature = "peers")]
    let jobs = [jobs, tuned_of_ranks()].concat();
    let jobs = unique(jobs);
    let count = jobs.len();
    let names: BTreeMap<_, _> = jobs.into_iter().map(|job| (job.name(), job)).collect();
    assert_eq!(names.len(), count, "two programs have one name");
    names
}

#[cfg(feature = "peers")]
#[test]
fn every_tuned_program_has_a_line() {
    let text = fs::read_to_string(PATH).expect("the file");
    assert!(lines(&text).keys().eq(all().keys()), "another list of programs than {PATH} has");
}

impl Job {
    /// The program in one word for each of what it depends on.
    fn name(&self) -> String {
        let KernelKey {
            program,
            call: CallKey { norm, dtypes, tensors, form, gate, has_parts, quant, .. },
            tile,
            column_groups,
            ranks,
        } = self.key;
        let (stem, norm, parts) = (program.info().stem, norm.name(), if has_parts { " parts" } else { "" });
        let uniform = DTypes::uniform(dtypes.activation);
        let dtypes = if dtypes == uniform { dtypes.activation.to_string() } else { dtypes.to_string() };
        let form = if form.norms_twice() {
            " next"
        } else if form.is_residual_after() {
            " after"
        } else {
            ""
        };
        let gate = gate.map_or(String::new(), |Gate { activation, slot }| {
            format!(" {}.{}", if slot == Slot::Before { "gate_before" } else { "gate_after" }, activation.name())
        });
        let of_groups = match column_groups {
            ColumnGroups::None => "",
            ColumnGroups::Blocks => " groups",
            ColumnGroups::Rows => " groups_as_rows",
        };
        let quant = quant.map_or(String::new(), |quant| {
            let QuantNumbers { scale, form, set, .. } = QuantNumbers::of(&quant);
            format!(" scale{scale}.{form}.{set}")
        });
        let ranks = if ranks > 1 { format!(" ranks{ranks}") } else { String::new() };
        let has = Tensor::ALL.into_iter().filter(|tensor| tensors.has(*tensor)).map(|tensor| tensor.name());
        let has = has.collect::<Vec<_>>().join("+");
        let Tile { pack, packs, threads_per_row, groups, cluster, unroll, stages, access_bytes, reads, .. } = tile;
        let reads = [
            (reads.keeps_row, " held"),
            (reads.loads_at_use, " late"),
            (reads.prefetches_weight, " early"),
            (tile.is_cooperative, " cooperative"),
        ];
        let reads: String = reads.into_iter().filter_map(|(is_it, word)| is_it.then_some(word)).collect();
        format!(
            "{stem} {norm} {dtypes} {}{form}{gate}{of_groups}{parts}{quant}{ranks} {has} \
             {pack}x{packs}x{threads_per_row}x{groups}x{cluster}x{unroll}x{stages}{reads} {access_bytes}",
            self.cols
        )
    }
}

impl Outcome {
    fn listed(&self) -> String {
        let Usage { registers, spills, .. } = self.usage;
        format!("{} {registers} {spills} {}", self.code_bytes, self.code_hash)
    }
}

/// The section of a cubin that has the code of this kernel.
pub(super) fn code<'a>(cubin: &'a [u8], kernel: &str) -> &'a [u8] {
    let number = |at: usize, bytes: usize| {
        cubin[at..at + bytes].iter().rev().fold(0, |number: usize, byte| number << 8 | usize::from(*byte))
    };
    // ELF of 64 bits: the place, size and count of section headers, and the section of their names.
    let (headers, size, count, names) = (number(40, 8), number(58, 2), number(60, 2), number(62, 2));
    let section = |index: usize| {
        let header = headers + index * size;
        (number(header, 4), number(header + 24, 8), number(header + 32, 8))
    };
    let names = section(names).1;
    let wanted = format!(".text.{kernel}\0");
    let mut sections = (0..count).map(section);
    let found = sections.find(|(name, ..)| cubin[names + name..].starts_with(wanted.as_bytes()));
    let (_, start, bytes) = found.unwrap_or_else(|| panic!("no code of {kernel}"));
    &cubin[start..start + bytes]
}
