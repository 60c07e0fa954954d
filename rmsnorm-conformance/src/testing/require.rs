//! One reading of `RMSNORM_REQUIRE`, which names what must not be absent: a comma-separated list, or `all`.
//!
//! A machine may lack a backend: an instruction set, a GPU. Its tests then print the reason and pass, unless the variable
//! names it. So a laptop tests what it has, and a machine that was rented for its GPU cannot go green without it.

use std::fmt::{self, Display};

use rmsnorm_spec::Error;

const REQUIRE: &str = "RMSNORM_REQUIRE";

/// The failure of a named test. `Debug`, which the test harness prints, is for people.
pub struct TestFailure(pub(crate) String);

impl fmt::Debug for TestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What was opened, or `None`, with the reason on stdout, where this machine lacks the backend and may.
///
/// # Errors
/// Where `RMSNORM_REQUIRE` names the backend that is [`Error::Unavailable`]; any other error always.
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

/// Says on stdout that something is absent, and why.
///
/// # Errors
/// Where `RMSNORM_REQUIRE` names it.
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

    /// In processes of their own, for their environment.
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
