//! Backends from the names and options of the command line. No other file of the program depends on
//! the kind of backend.

use rmsnorm_core::cpu::{CpuBackend, Isa};
use rmsnorm_core::{AnyBackend, Norm, ParseDeviceError, available};

use crate::args::CpuArgs;
use crate::failure::Failure;

/// The value called `name`. `flag` is the option that the error names.
///
/// # Errors
/// No value has the name; the message lists all names.
pub fn one_of<V: Copy>(flag: &str, name: &str, all: &[V], name_of: impl Fn(V) -> &'static str) -> Result<V, Failure> {
    all.iter().copied().find(|&value| name_of(value) == name).ok_or_else(|| {
        let known: Vec<_> = all.iter().map(|&value| name_of(value)).collect();
        Failure::Input(format!("{flag}: expected one of {}, got {name:?}", known.join(", ")))
    })
}

/// The values called `names`, or all values if `names` is empty. `flag` is the option that the
/// error names.
///
/// # Errors
/// As [`one_of`].
pub fn choose<V: Copy>(
    flag: &str,
    names: &[String],
    all: &[V],
    name_of: impl Fn(V) -> &'static str,
) -> Result<Vec<V>, Failure> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    names.iter().map(|name| one_of(flag, name, all, &name_of)).collect()
}

/// The norms with these names; without a name the two that most models have.
///
/// # Errors
/// No norm has the name.
pub fn norms(names: &[String]) -> Result<Vec<Norm>, Failure> {
    if names.is_empty() { Ok(Norm::USUAL.to_vec()) } else { choose("--norm", names, &Norm::ALL, Norm::name) }
}

/// Opens the backend called `name`. `args` applies to the cpu backend alone.
///
/// # Errors
/// No backend has the name, or this build or this machine lacks it, its instruction set or its
/// threads.
pub fn open(name: &str, args: &CpuArgs) -> Result<AnyBackend, Failure> {
    let device = name.parse().map_err(|error: ParseDeviceError| Failure::Input(error.to_string()))?;
    let backend = AnyBackend::open(device)?;
    let isa = args.isa.as_deref().map(|isa| one_of("--isa", isa, &Isa::ALL, Isa::name)).transpose()?;
    match (backend.as_cpu(), isa, args.threads) {
        (None, ..) | (Some(_), None, None) => Ok(backend),
        (Some(cpu), isa, threads) => {
            let (isa, threads) = (isa.unwrap_or(cpu.isa()), threads.unwrap_or(cpu.threads()));
            Ok(AnyBackend::Cpu(CpuBackend::with_isa_and_threads(isa, threads)?))
        }
    }
}

/// The options in `args`, as the user gave them, each after a space. Empty without options.
pub fn flags(args: &CpuArgs) -> String {
    let isa = args.isa.as_ref().map(|isa| format!(" --isa {isa}"));
    let threads = args.threads.map(|threads| format!(" --threads {threads}"));
    isa.into_iter().chain(threads).collect()
}

/// The names of the devices that can be used on this machine.
pub fn names() -> Vec<String> {
    available().into_iter().filter(|entry| entry.status.is_ok()).map(|entry| entry.device.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_choose_instruction_set_and_threads_each_alone() {
        let strongest = CpuBackend::new();
        let open = |isa: Option<&str>, threads| {
            let args = CpuArgs { isa: isa.map(Into::into), threads };
            let backend = open("cpu", &args).unwrap();
            let cpu = backend.as_cpu().unwrap();
            (cpu.isa(), cpu.threads(), flags(&args))
        };
        let default = (strongest.isa(), strongest.threads());
        assert_eq!(open(None, None), (default.0, default.1, String::new()));
        assert_eq!(open(Some("portable"), None), (Isa::Portable, default.1, " --isa portable".into()));
        assert_eq!(open(None, Some(3)), (default.0, 3, " --threads 3".into()));
        assert_eq!(open(Some("portable"), Some(1)), (Isa::Portable, 1, " --isa portable --threads 1".into()));
    }
}
