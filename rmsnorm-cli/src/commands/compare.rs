//! `rmsnorm compare`: prints saved measurements side by side.

use std::path::Path;

use rmsnorm_bench::figure::{Figure, Found, join, read};
use rmsnorm_bench::{Shape, bars, plot, side_by_side, targets};

use crate::args::CompareArgs;
use crate::failure::Failure;
use crate::output::{OutputFile, print, tell};

/// Prints the table and the comparison with the targets, and writes the pictures.
pub fn run(args: &CompareArgs) -> Result<(), Failure> {
    let picture = args.plot.as_deref().map(OutputFile::new).transpose()?;
    let bars = args.bars.as_deref().map(OutputFile::new).transpose()?;
    let shape = args.shape.as_deref().map(str::parse::<Shape>).transpose();
    let shape = shape.map_err(|error| Failure::Input(format!("--shape: {error}")))?;
    let targets = args.targets.as_deref().map(targets::read).transpose()?;
    let figures = join(read_all(&args.files)?);
    if figures.is_empty() {
        return Err(Failure::Input("the files have no measurements to compare".into()));
    }
    let bars = bars.map(|file| bars::svg(&figures, shape).map(|svg| (file, svg))).transpose()?;
    let svg = picture.map(|file| plot::svg(&figures).map(|svg| (file, svg))).transpose()?;
    print(&side_by_side::table(&figures).unwrap_or("no two sources have a shape in common\n".into()))?;
    if let Some(targets) = targets {
        print(&format!("\n{}", targets::table(&figures, &targets)))?;
    }
    svg.into_iter().chain(bars).try_for_each(|(file, svg)| file.write(&[svg.as_bytes()]))
}

/// The figures of each file, with the name of the file without folder and extension. A note lists
/// the rows that are left out.
///
/// # Errors
/// A file cannot be read.
pub fn read_all(files: &[impl AsRef<Path>]) -> Result<Vec<(String, Vec<Figure>)>, Failure> {
    let name = |path: &Path| path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let figures = |path: &Path| {
        let Found { figures, left_out } = read(path)?;
        if !left_out.is_empty() {
            tell(&format!("note: {}: left out {left_out:?}, which are not ours", path.display()));
        }
        Ok((name(path), figures))
    };
    files.iter().map(AsRef::as_ref).map(figures).collect()
}
