//! `rmsnorm tune`: its table is used, and is ignored or refused for another device. Also on a
//! software adapter, if the machine has one.

use serde_json::Value;

use crate::support::{Folder, Outcome};

const CACHE: (&str, &str) = ("RMSNORM_CACHE_DIR", "cache");

fn run(folder: &Folder, variables: &[(&str, &str)], args: &[&str]) -> Outcome {
    folder.rmsnorm_with(&[&[CACHE], variables].concat(), args)
}

/// The tuning table in a backend's line, or the reason why the backend is missing.
fn table(folder: &Folder, backend: &str, variables: &[(&str, &str)]) -> String {
    let report: Value = serde_json::from_str(&run(folder, variables, &["devices", "--json"]).stdout).unwrap();
    let devices = report["devices"].as_array().unwrap();
    let device = devices.iter().find(|device| device["name"] == backend).unwrap();
    device["tuning"].as_str().or(device["reason"].as_str()).unwrap().to_owned()
}

/// The file of the table in the cache folder.
fn written(folder: &Folder, backend: &str) -> String {
    let names = std::fs::read_dir(folder.path("cache")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names = names.map(|name| name.into_string().unwrap()).filter(|name| name.starts_with("tuning-"));
    let name = names.find(|name| name.starts_with(&format!("tuning-{backend}-"))).unwrap();
    format!("cache/{name}")
}

/// Tunes briefly, and checks that the table is used.
fn tunes_and_is_used(folder: &Folder, backend: &str, args: &[&str]) {
    assert_eq!(table(folder, backend, &[]), "built in");
    let outcome = run(folder, &[], &[&["tune", "--backend", backend][..], args].concat());
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let file = written(folder, backend);
    assert!(outcome.stdout.ends_with(&format!("written: {file}\n")), "{}", outcome.stdout);
    let used = table(folder, backend, &[]);
    assert!(used.starts_with(&format!("{file} of 20")), "{used}");
    assert_eq!(table(folder, backend, &[("RMSNORM_TUNING", "off")]), "built in");
    assert_eq!(table(folder, backend, &[("RMSNORM_TUNING", &file)]), used);

    let text = std::fs::read_to_string(folder.path(&file)).unwrap();
    for (from, to, reason) in [
        ("kernels = \"", "kernels = \"0", "it is for the kernels \"0"),
        ("[numbers]", "[numbers]\ncolour = 1", "unknown ladder or number \"colour\""),
        ("format = 1", "format = 1\nformat = 1", "line "),
    ] {
        folder.write(&file, text.replace(from, to).as_bytes());
        let ignored = table(folder, backend, &[]);
        assert!(ignored.starts_with(&format!("built in; {file} ignored: ")) && ignored.contains(reason), "{ignored}");
        let refused = table(folder, backend, &[("RMSNORM_TUNING", &file)]);
        assert!(refused.contains(&format!("RMSNORM_TUNING names {file}: ")) && refused.contains(reason), "{refused}");
    }
}

#[test]
fn cpu_is_tuned_and_its_table_used() {
    let folder = Folder::new();
    tunes_and_is_used(&folder, "cpu", &["--minutes", "0.02"]);
    // Reports name the table too.
    let file = written(&folder, "cpu");
    std::fs::remove_file(folder.path(&file)).unwrap();
    let outcome = run(&folder, &[], &["tune", "--backend", "cpu", "--minutes", "1e-9", "--output", "own.toml"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stdout.contains(" not reached\n") && !folder.path(&file).exists(), "{outcome:?}");
    let own = [("RMSNORM_TUNING", "own.toml")];
    let bench = run(&folder, &own, &["bench", "--backend", "cpu", "--shapes", "1x64", "--seconds", "0", "--json", "-"]);
    let document: Value = serde_json::from_str(&bench.stdout).unwrap();
    let said = document["reports"][0]["tuning"].as_str().unwrap();
    assert!(said.starts_with("own.toml of 20"), "{said}");
    let case = "bounds:forward:rms_norm:f16,f32,f16:3x17:randn:eps1e-6:ws:offset1:at_store:partials:p1o3:seed9";
    let proof = run(&folder, &own, &["conformance", "--case", case]);
    assert!(proof.stdout.contains("\ntuning      own.toml of 20"), "{}", proof.stdout);
    let bench =
        run(&folder, &own, &["bench", "--backend", "cpu", "--shapes", "1x64", "--seconds", "0", "--dtype", "f32"]);
    assert!(bench.stdout.contains("\ntuning: own.toml of 20"), "{}", bench.stdout);
}

#[test]
fn what_is_not_wanted_is_not_written() {
    let folder = Folder::new();
    let outcome = run(&folder, &[], &["tune", "--backend", "cpu", "--minutes", "1e-9", "--dry-run"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stdout.ends_with("no table was written: --dry-run\n"), "{}", outcome.stdout);
    assert!(!folder.path("cache").exists());
}

/// A named file that is no table is an error of one line, before anything is computed.
#[test]
fn a_table_that_is_asked_for_must_fit() {
    let folder = Folder::new();
    folder.write("wrong.toml", b"format = 1\n");
    for (file, reason) in [("absent.toml", "which does not exist"), ("wrong.toml", "line 1: missing field `backend`")] {
        let outcome = run(&folder, &[("RMSNORM_TUNING", file)], &["conformance", "--list"]);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
        assert!(outcome.stderr.contains(file) && outcome.stderr.contains(reason), "{}", outcome.stderr);
    }
}

#[test]
fn tune_bad_arguments_are_one_line() {
    let cases: [(&[&str], &[&str]); 7] = [
        (&["--backend", "tpu"], &["cpu, cuda and wgpu", "tpu"]),
        (&["--backend", "cuda"], &["the cuda backend is not available: "]),
        (&["--minutes", "0"], &["--minutes", "more than 0"]),
        (&["--minutes", "nan"], &["--minutes", "NaN"]),
        (&["--only", "sideways"], &["--only", "forward, backward, add_forward", "sideways"]),
        (&["--dtype", "f64"], &["--dtype", "f32, f16, bf16", "f64"]),
        (&["--backend", "cpu", "--cols", "7"], &["this backend's table has no rung"]),
    ];
    for (args, words) in cases {
        let folder = Folder::new();
        let outcome = run(&folder, &[], &[&["tune"], args].concat());
        assert_eq!(outcome.code, Some(2), "{args:?}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
        assert!(words.iter().all(|word| outcome.stderr.contains(word)), "{args:?}: {}", outcome.stderr);
        assert!(folder.names().is_empty());
    }
}

/// An entry of short rows, whose shaders a software adapter compiles fast.
#[test]
fn adapter_is_tuned_and_its_table_used() {
    let Some(folder) = crate::gpu::device("wgpu") else { return };
    tunes_and_is_used(&folder, "wgpu", &["--minutes", "0.15", "--only", "forward", "--cols", "256", "--dtype", "bf16"]);
}

#[test]
fn gpu_is_tuned_and_its_table_used() {
    let Some(folder) = crate::gpu::device("cuda") else { return };
    tunes_and_is_used(&folder, "cuda", &["--minutes", "0.2", "--only", "forward", "--cols", "4096", "--dtype", "bf16"]);
}
