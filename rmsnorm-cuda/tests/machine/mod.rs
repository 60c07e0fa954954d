//! A machine for a child process, with stand-ins for NVIDIA's libraries in front of the real ones.
//! The C compiler `cc` builds them; without `cc` the cases that need them are skipped.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use tempfile::TempDir;

/// Set in child processes.
const CHILD: &str = "RMSNORM_TEST_CHILD";

/// A folder of libraries that the loader searches first.
pub struct Machine {
    folder: TempDir,
}

impl Machine {
    /// A machine where these libraries cannot be loaded; they hide the real ones.
    pub fn broken(names: &[&str]) -> Machine {
        let machine = Machine { folder: tempfile::tempdir().expect("a folder") };
        for name in names {
            fs::write(machine.path().join(name), "no library").expect("a file");
        }
        machine
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Adds this library, compiled with these numbers as macros.
    pub fn library(&self, name: &str, source: &str, numbers: &[(&str, i32)]) {
        let file = self.path().join("standin.c");
        fs::write(&file, source).expect("a source");
        let defines = numbers.iter().map(|(name, value)| format!("-D{name}={value}"));
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o"]).arg(self.path().join(name)).arg(file).args(defines);
        let output = cc.output().expect("a C compiler");
        assert!(output.status.success(), "{output:?}");
    }

    /// The output of this program's test `child_answers` on this machine, with the task `what` and
    /// these variables.
    pub fn run(&self, what: &str, variables: &[(&str, &str)]) -> String {
        let mut child = Command::new(env::current_exe().expect("this test"));
        child.args(["--exact", "child_answers", "--nocapture"]).env(CHILD, what).env("LD_LIBRARY_PATH", self.path());
        let output = child.envs(variables.iter().copied()).output().expect("a process");
        assert!(output.status.success(), "the process failed: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// The task of a child process.
pub fn told() -> Option<String> {
    env::var(CHILD).ok()
}

/// The rest of the first line that starts with `begin`.
pub fn line<'a>(text: &'a str, begin: &str) -> &'a str {
    text.lines().find_map(|line| line.strip_prefix(begin)).unwrap_or_else(|| panic!("no {begin:?} in: {text}"))
}

pub fn has_c_compiler() -> bool {
    let found = Command::new("cc").arg("--version").output().is_ok();
    if !found {
        println!("skipped: no C compiler `cc` to make stand-ins with");
    }
    found
}
