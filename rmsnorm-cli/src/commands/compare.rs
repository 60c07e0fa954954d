//! `rmsnorm compare`: prints saved measurements side by side.

use std::path::Path;

use rmsnorm_bench::figure::{Conditions, Figure, Found, join, read};
use rmsnorm_bench::{bars, plot, side_by_side, targets};

use crate::args::CompareArgs;
use crate::failure::Failure;
use crate::output::{OutputFile, print};

/// The figures of each file, by its name.
type Files = Vec<(String, Vec<Figure>)>;

/// Prints the table and the comparison with the targets, and writes the pictures.
pub fn run(args: &CompareArgs) -> Result<(), Failure> {
    let picture = args.plot.as_deref().map(OutputFile::new).transpose()?;
    let bars = args.bars.as_deref().map(OutputFile::new).transpose()?;
    let targets = args.targets.as_deref().map(targets::read).transpose()?;
    let (files, conditions) = read_with_conditions(&args.files)?;
    let mut figures = join(files);
    if figures.is_empty() {
        return Err(Failure::Input("the files have no measurements to compare".into()));
    }
    let has = |given: &[String], name: &str| given.is_empty() || given.iter().any(|known| known == name);
    figures.retain(|Figure { subject, .. }| {
        has(&args.op, &subject.operation()) && has(&args.dtype, &subject.dtype) && has(&args.shapes, &subject.shape())
    });
    if figures.is_empty() {
        let why = "no measurement in the files has the given --op, --dtype and --shapes: leave one of them out";
        return Err(Failure::Input(why.into()));
    }
    let bars = bars.map(|file| bars::svg(&figures).map(|svg| (file, svg))).transpose()?;
    let svg = picture.map(|file| plot::svg(&figures).map(|svg| (file, svg))).transpose()?;
    if args.markdown {
        let place = |given: &[String], name: &str| given.iter().position(|known| known == name);
        let page = side_by_side::page(&figures, |subject| {
            (place(&args.op, &subject.operation()), place(&args.shapes, &subject.shape()))
        });
        print(&format!("{page}\n{conditions}.\n"))?;
    } else {
        print(&side_by_side::table(&figures).unwrap_or("no two sources have a shape in common\n".into()))?;
    }
    if let Some(targets) = targets {
        print(&format!("\n{}", targets::table(&figures, &targets)))?;
    }
    svg.into_iter().chain(bars).try_for_each(|(file, svg)| file.write(&[svg.as_bytes()]))
}

/// The figures of each file, with the name of the file without folder and extension.
///
/// # Errors
/// A file cannot be read.
pub fn read_all(files: &[impl AsRef<Path>]) -> Result<Files, Failure> {
    Ok(read_with_conditions(files)?.0)
}

/// As [`read_all`], with the machines and programs of all files.
fn read_with_conditions(files: &[impl AsRef<Path>]) -> Result<(Files, Conditions), Failure> {
    let mut conditions = Conditions::default();
    let mut all = Vec::new();
    for path in files.iter().map(AsRef::as_ref) {
        let Found { figures, conditions: of_file } = read(path)?;
        conditions.extend(of_file);
        all.push((path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(), figures));
    }
    Ok((all, conditions))
}
