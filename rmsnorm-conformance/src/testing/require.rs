//! Reads `RMSNORM_REQUIRE`: a comma-separated list of backends that must not be missing, or `all`.
//!
//! If a machine lacks a backend (an instruction set, a GPU), the backend's tests print the reason
//! and pass, unless the variable names it. A laptop thus tests the backends that it has, and a
//! machine that was rented for its GPU cannot pass without it.

use std::fmt::{self, Display};

use rmsnorm_spec::Error;

const REQUIRE: &str = "RMSNORM_REQUIRE";

/// The failure of a named test. Its `Debug` text, which the test harness prints, is readable.
pub struct TestFailure(pub(crate) String);

impl fmt::Debug for TestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The opened backend, or `None` if this machine lacks it and need not have it; the reason is
/// printed to stdout.
///
/// # Errors
/// [`Error::Unavailable`] if `RMSNORM_REQUIRE` names the backend; any other error always.
pub fn available<T>(opened: Result<T, Error>) -> Result<Option<T>, TestFailure> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(Error::Unavailable { backend, reason }) => {
            let error = Error::Unavailable { backend, reason };
            skip_or_fail(backend, error).map(|()| None)
        }
        Err(error) => Err(TestFailure(error.to_string())),
    }
}

/// Prints to stdout that something is missing, and why.
///
/// # Errors
/// If `RMSNORM_REQUIRE` names it.
pub fn skip_or_fail(name: &str, reason: impl Display) -> Result<(), TestFailure> {
    let required = std::env::var_os(REQUIRE).unwrap_or_default();
    let required = required.to_string_lossy();
    if is_named(name, &required) {
        return Err(TestFailure(format!("{reason}, and {REQUIRE}={required} asks for {name}")));
    }
    println!("skipped: {reason}");
    Ok(())
}

fn is_named(name: &str, required: &str) -> bool {
    required.split(',').map(str::trim).any(|one| one == name || one == "all")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn absent() -> Result<(), Error> {
        Err(Error::Unavailable { backend: "cuda", reason: "no driver".into() })
    }

    #[test]
    fn a_backend_is_required_by_its_whole_name_or_by_all() {
        for required in ["", "cpu", "cpu,wgpu", "cud", "cuda2"] {
            assert!(!is_named("cuda", required), "{required:?}");
        }
        for required in ["cuda", "all", "cpu, cuda", "wgpu,all"] {
            assert!(is_named("cuda", required), "{required:?}");
        }
    }

    #[test]
    fn what_is_present_is_tested_and_what_is_broken_fails() {
        assert!(matches!(available(Ok(7)), Ok(Some(7))));
        let broken: Result<(), _> = Err(Error::Unsupported { rule: "no such device".into() });
        assert_eq!(available(broken).expect_err("it is no absence").0, "unsupported: no such device");
    }

    /// Runs child processes, because each needs a different environment.
    #[test]
    fn variable_turns_a_skip_into_a_failure() {
        const CHILD: &str = "RMSNORM_REQUIRE_CHILD";
        if std::env::var_os(CHILD).is_some() {
            println!("{:?}", available(absent()));
            return;
        }
        let (_, module) = module_path!().split_once("::").expect("a module of the crate");
        let name = format!("{module}::variable_turns_a_skip_into_a_failure");
        let error = "the cuda backend is not available: no driver";
        let skipped = format!("skipped: {error}\nOk(None)\n");
        let failed = |required| format!("Err({error}, and RMSNORM_REQUIRE={required} asks for cuda)\n");
        for (required, answer) in [
            (None, skipped.clone()),
            (Some(""), skipped.clone()),
            (Some("cpu"), skipped),
            (Some("cuda"), failed("cuda")),
            (Some("cpu,cuda"), failed("cpu,cuda")),
            (Some("all"), failed("all")),
        ] {
            let mut child = Command::new(std::env::current_exe().expect("this program"));
            child.args(["--exact", &name, "--nocapture"]).env(CHILD, "").env_remove(REQUIRE);
            let child = child.envs(required.map(|required| (REQUIRE, required))).output().expect("a child");
            let stdout = String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success() && stdout.contains(&answer), "{required:?}: {child:?}");
        }
    }
}
