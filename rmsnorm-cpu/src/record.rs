//! What a measured call ran: see [`Recorded`].

use rmsnorm_conformance::{Record, Recorded, read_caps, write_caps};
use rmsnorm_spec::{Error, Problem, Stage};

use crate::caps::Caps;
use crate::{CpuBackend, plan};

macro_rules! sources {
    ($($path:literal),* $(,)?) => {
        [$(($path, include_str!($path))),*]
    };
}

/// All that kernels are made of. Compiled code has no text of its own.
const SOURCES: [(&str, &str); 11] = sources![
    "kernel.rs",
    "lanes/avx2.rs",
    "lanes/avx512.rs",
    "lanes/mod.rs",
    "lanes/portable.rs",
    "stages/backward.rs",
    "stages/copy.rs",
    "stages/forward.rs",
    "stages/matrix.rs",
    "stages/mod.rs",
    "stages/reduce_partials.rs",
];

impl Recorded for CpuBackend {
    fn caps(&self) -> String {
        write_caps(&Caps { isa: self.isa(), threads: self.threads() })
    }

    fn record(caps: &str, problem: &Problem) -> Result<Record, Error> {
        let caps: Caps = read_caps(caps)?;
        if caps.threads == 0 {
            return Err(Error::Unsupported { rule: "capabilities must have at least one thread, got 0".into() });
        }
        let plan::Plan { tasks, reduce_tasks, block_rows, blocks, streaming } = plan::plan(problem, &caps);
        let way = if streaming { "past the cache" } else { "through the cache" };
        let mut described = format!("{}, tasks {tasks}, {way}", caps.isa.name());
        if problem.stage == Stage::Backward {
            described += &format!("; blocks {blocks} of {block_rows} rows, added in tasks {reduce_tasks}");
        }
        Ok(Record::new(described, SOURCES.map(|(_, text)| text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_kernels_is_hashed() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut found = vec!["kernel.rs".to_owned()];
        for part in ["lanes", "stages"] {
            for file in std::fs::read_dir(folder.join(part)).unwrap() {
                found.push(format!("{part}/{}", file.unwrap().file_name().to_str().unwrap()));
            }
        }
        found.sort();
        assert_eq!(found, SOURCES.map(|(path, _)| path));
    }
}
