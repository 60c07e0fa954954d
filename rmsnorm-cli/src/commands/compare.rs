//! `rmsnorm compare`: measurements of earlier runs, and published kernels', side by side.

use std::path::Path;

use rmsnorm_bench::figure::{Figure, Found, join, read};
use rmsnorm_bench::{plot, side_by_side, targets};

use crate::args::CompareArgs;
use crate::failure::Failure;
use crate::output::{OutputFile, print, tell};

/// Prints the table and what became of the targets, and writes the picture.
pub fn run(args: &CompareArgs) -> Result<(), Failure> {
    let picture = args.plot.as_deref().map(OutputFile::new).transpose()?;
    let targets = args.targets.as_deref().map(targets::read).transpose()?;
    let figures = join(read_all(&args.files)?);
    if figures.is_empty() {
        return Err(Failure::Input("the files have no measurements to compare".into()));
    }
    let svg = picture.map(|file| plot::svg(&figures).map(|svg| (file, svg))).transpose()?;
    print(&side_by_side::table(&figures).unwrap_or("no two sources have a shape in common\n".into()))?;
    if let Some(targets) = targets {
        print(&format!("\n{}", targets::table(&figures, &targets)))?;
    }
    svg.map_or(Ok(()), |(file, svg)| file.write(&[svg.as_bytes()]))
}

/// The figures of every file, by its name without folder and extension. What a file has beside them is told.
///
/// # Errors
/// The first file that cannot be read.
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
