//! The other commands: their output, and their errors.

use serde_json::Value;

use crate::support::Folder;

#[test]
fn devices_lists_every_backend_or_why_it_is_missing_and_the_fix() {
    let outcome = Folder::new().rmsnorm(&["devices"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert!(lines[0].starts_with("cpu    ready") && lines[0].contains("thread"), "{lines:?}");
    assert_eq!(lines[1], "       tuning   built in");
    for (line, start) in [(lines[2], "cuda   missing  "), (lines[4], "wgpu   missing  ")] {
        let reason = line.strip_prefix(start).unwrap();
        assert!(!reason.is_empty() && !reason.contains("not built in") && !reason.contains("fix: "), "{lines:?}");
    }
    // The machine has no driver, or the environment hides the GPUs from it.
    let fix = lines[3].strip_prefix("       fix      ").unwrap();
    assert!(
        ["install NVIDIA's driver", "unset CUDA_VISIBLE_DEVICES"].iter().any(|start| fix.starts_with(start)),
        "{fix}"
    );
    assert_eq!(lines[5..], ["       fix      unset WGPU_BACKEND, which is \"gl\""]);
}

#[test]
fn devices_json_is_one_object() {
    let outcome = Folder::new().rmsnorm(&["devices", "--json"]);
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!((&report["devices"][0]["name"], &report["devices"][0]["available"]), (&"cpu".into(), &true.into()));
    assert_eq!(report["devices"][1]["available"], false);
    assert!(report["devices"][1]["reason"].is_string());
}

/// The first screen of a newcomer: devices, then a proof of each, then one table of speeds whose
/// columns are explained.
#[test]
fn bare_command_lists_proves_and_measures() {
    let outcome = Folder::new().rmsnorm(&[]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{}", outcome.stdout);
    let place = |text: &str| outcome.stdout.find(text).unwrap_or_else(|| panic!("no {text:?} in {}", outcome.stdout));
    let parts = [
        "rmsnorm ",
        "\nDEVICES\ncpu    ready    ",
        "\ncuda   missing  ",
        "\nRESULTS ",
        "\ncpu    proved: ",
        " results within their bounds, in ",
        "\nSPEEDS\ndevice operation ",
        "time, us",
        "copy GB/s",
        "\ncpu    rms_norm forward ",
        "\ncpu    layer_norm backward ",
        "\ntime, us   median time of one call, in microseconds\n",
        "\n* the tensors fit into the cache",
        "\nNEXT ",
    ];
    let places = parts.map(place);
    assert!(places.is_sorted(), "{places:?}: {}", outcome.stdout);
    // Two norms, forward and backward, in two dtypes and two shapes.
    assert_eq!(outcome.stdout.matches("\ncpu    ").count() - 2, 2 * 2 * 2 * 2, "{}", outcome.stdout);
}

#[test]
fn help_lists_every_command() {
    for flag in ["--help", "-h"] {
        let outcome = Folder::new().rmsnorm(&[flag]);
        assert_eq!(outcome.code, Some(0));
        for command in ["devices", "conformance", "bench", "compare", "warm", "tune", "run"] {
            assert!(outcome.stdout.contains(&format!("\n  {command}")), "{command} is not in {}", outcome.stdout);
        }
    }
}

/// The help of each command with `--backend` names the backends.
#[test]
fn help_names_every_backend() {
    for command in ["conformance", "run", "bench"] {
        let outcome = Folder::new().rmsnorm(&[command, "--help"]);
        for backend in ["cpu", "cuda", "wgpu"] {
            assert!(outcome.stdout.contains(backend), "{backend} is not in {}", outcome.stdout);
        }
    }
}

#[test]
fn bad_usage_exits_with_2_and_prints_nothing_to_stdout() {
    for args in [&["dance"] as &[_], &["run"], &["run", "in"], &["devices", "--yaml"]] {
        let outcome = Folder::new().rmsnorm(args);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{args:?}");
        assert!(outcome.stderr.starts_with("error: "), "{}", outcome.stderr);
    }
}

#[test]
fn conformance_bad_arguments_are_one_line() {
    let cases: [(&[&str], &[&str]); 14] = [
        (&["--part", "0/3"], &["--part", "K/N", "0/3"]),
        (&["--part", "4/3"], &["--part", "K/N", "4/3"]),
        (&["--part", "1/0"], &["--part", "K/N", "1/0"]),
        (&["--part", "1"], &["--part", "K/N"]),
        (&["--backend", "tpu"], &["cpu, cuda and wgpu", "tpu"]),
        (&["--backend", "wgpu"], &["the wgpu backend is not available: "]),
        (&["--backend", "cuda"], &["the cuda backend is not available: "]),
        (&["--backend", "cuda:7"], &["the cuda backend is not available: "]),
        (&["--backend", "cuda:x"], &["cuda:N", "cuda:x"]),
        (&["--profile", "huge"], &["--profile", "smoke, core, full, stress", "huge"]),
        (&["--isa", "sse"], &["--isa", "portable, avx2, avx512", "sse"]),
        (&["--threads", "0"], &["thread", "0"]),
        (&["--case", "bad"], &["bad"]),
        (&["--json", "absent/report"], &["cannot write absent/report"]),
    ];
    for (args, words) in cases {
        refuse("conformance", args, words);
    }
}

#[test]
fn bench_bad_arguments_are_one_line() {
    let cases: [(&[&str], &[&str]); 15] = [
        // Products that wrap to 0 and to 2.
        (&["--shapes", "4294967296x4294967296"], &["--shapes", "exceed the address space"]),
        (&["--shapes", "9223372036854775809x2"], &["--shapes", "exceed the address space"]),
        (&["--backend", "cpu,cuda"], &["the cuda backend is not available: "]),
        (&["--backend", "cuda:x"], &["cuda:N", "cuda:x"]),
        (&["--reduction", "partials,trees"], &["--reduction", "partials, locks, atomics", "trees"]),
        (&["--isa", "sse"], &["--isa", "portable, avx2, avx512", "sse"]),
        (&["--threads", "0"], &["thread", "0"]),
        (&["--op", "forward,sideways"], &["--op", "forward, add_forward, backward", "sideways"]),
        (
            &["--op", "quantized_forward", "--quant", "row,column"],
            &["--quant", "row, block128, mx, block128_columnwise, mx_columnwise", "column"],
        ),
        (&["--op", "forward", "--quant", "row"], &["--quant", "--op quantized_forward"]),
        (&["--shapes", "4096"], &["--shapes", "4096x1024", "\"4096\""]),
        (&["--shapes", "2x8,65536x1025"], &["--shapes", "at most 67108864 elements", "65536x1025 in f32"]),
        (&["--shapes", "4294967296x4294967295"], &["--shapes", "exceed the address space"]),
        (&["--shapes", "99999999999x99999999999"], &["--shapes", "exceed the address space"]),
        (&["--seconds", "61"], &["--seconds", "0 to 60", "61"]),
    ];
    for (args, words) in cases {
        refuse("bench", args, words);
    }
}

/// Bad arguments: exit code 2, one line on stderr with each of the words, and no file.
fn refuse(command: &str, args: &[&str], words: &[&str]) {
    let folder = Folder::new();
    let outcome = folder.rmsnorm(&[&[command], args].concat());
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{args:?}: {outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    for word in words {
        assert!(outcome.stderr.contains(word), "{word:?} is not in {:?}", outcome.stderr);
    }
    assert!(folder.names().is_empty());
}

#[test]
fn bench_measures_what_this_machine_has_as_told() {
    let shapes = ["--shapes", "2x8", "--seconds", "0"];
    let outcome = Folder::new().rmsnorm(&[&["bench", "--isa", "portable", "--threads", "1"], &shapes[..]].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{}", outcome.stdout);
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert!(lines[0].ends_with(", portable, 1 thread"), "{lines:?}");
    assert_eq!(lines[1], "tuning: built in");
    // The heading, two norms of three operations in two dtypes, and the note on rates from the
    // cache.
    assert_eq!(lines.len(), 3 + 2 * 3 * 2 + 1, "{lines:?}");
}

#[test]
fn bench_json_says_how_every_row_was_measured() {
    let args = ["bench", "--shapes", "2x8,3000x32", "--seconds", "0", "--dtype", "f16", "--norm", "layer_norm"];
    let reductions = ["--reduction", "atomics,partials"];
    let outcome = Folder::new().rmsnorm(&[&args[..], &reductions, &["--json", "-"]].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{}", outcome.stdout);
    let document: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let report = &document["reports"][0];
    assert_eq!((&report["backend"], &report["device"]), (&"cpu".into(), &document["machine"]["devices"][0]));
    let rule = report["unsupported"][0].as_str().unwrap();
    assert!(rule.starts_with("layer_norm backward atomics: ") && rule.contains("Partials"), "{rule}");
    let rows = report["rows"].as_array().unwrap();
    let of = |row: &Value| (row["op"].clone(), row["reduction"].clone(), row["sets"].as_u64().unwrap() > 1);
    let expected = [false, true].map(|is_cold| {
        ["forward", "add_forward", "backward"].map(|op| {
            let reduction = if op == "backward" { "partials".into() } else { Value::Null };
            (op.into(), reduction, is_cold)
        })
    });
    assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), expected.concat());
    assert!(rows.iter().all(|row| row["mode"] == "wall" && row["us"].as_f64().unwrap() > 0.0));
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        let samples: Vec<f64> = row["samples_us"].as_array().unwrap().iter().map(|us| us.as_f64().unwrap()).collect();
        assert!(samples.len() >= 7 && samples.contains(&number("us")) && samples.contains(&number("us_p95")), "{row}");
        assert!(number("us") <= number("us_p95"), "{row}");
        let rate = number("bytes") / number("us") * 1e-3;
        assert!((number("gbs") / rate - 1.0).abs() < 1e-6, "{row}");
        // f16, read once and written once.
        let copied = 2.0 * 2.0 * number("rows") * number("cols");
        assert!((number("copy_gbs") / (copied / number("copy_us") * 1e-3) - 1.0).abs() < 1e-6, "{row}");
        assert!((number("of_copy") - number("gbs") / number("copy_gbs")).abs() < 1e-6, "{row}");
    }
}

#[test]
fn conformance_report_has_a_line_per_case_and_each_can_be_replayed() {
    let folder = Folder::new();
    let outcome = folder.rmsnorm(&["conformance", "--profile", "smoke", "--most-cases", "150", "--json", "report"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{}", outcome.stdout);
    let report = std::fs::read_to_string(folder.path("report")).unwrap();
    let mut lines: Vec<Value> = report.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let summary = lines.pop().unwrap();
    assert_eq!((&summary["backend"], &summary["success"]), (&"cpu".into(), &true.into()));
    let passed = lines.iter().filter(|line| line["status"] == "pass").count();
    assert_eq!(summary["counts"]["passed"], passed);
    assert!(outcome.stdout.lines().last().unwrap().starts_with(&format!("{passed} passed, 0 failed, ")));

    let id = lines[lines.len() - 1]["id"].as_str().unwrap();
    for flags in [&[] as &[_], &["--isa", "portable", "--threads", "1"]] {
        let replay = folder.rmsnorm(&[&["conformance", "--backend", "cpu", "--case", id], flags].concat());
        assert_eq!(replay.code, Some(0), "{id}: {replay:?}");
        assert_eq!(replay.stdout.lines().last(), Some("1 passed, 0 failed, 0 skipped"));
        assert_eq!(replay.stdout.contains("portable, 1 thread,"), !flags.is_empty(), "{}", replay.stdout);
    }
    // The system may refuse so many threads.
    let replay = folder.rmsnorm(&["conformance", "--case", id, "--threads", "1000"]);
    match replay.code {
        Some(0) => assert!(replay.stdout.contains("1000 threads") && replay.stdout.contains("1 passed"), "{replay:?}"),
        code => assert_eq!((code, replay.stderr.lines().count()), (Some(2), 1), "{replay:?}"),
    }
}

/// Parts have a list each, so that several processes can share the work.
#[test]
fn conformance_list_has_the_ids_of_what_runs() {
    let list = |flags: &[&str]| {
        let outcome = Folder::new().rmsnorm(&[&["conformance", "--profile", "smoke", "--list"], flags].concat());
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
        outcome.stdout.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let mut all = list(&[]);
    assert!(all.len() > 189 && all.iter().any(|id| id == "spans"), "{}", all.len());
    let mut parts = [list(&["--part", "1/2"]), list(&["--part", "2/2"])].concat();
    all.sort();
    parts.sort();
    assert_eq!(all, parts);
    assert_eq!(list(&["--case", "spans"]), ["spans"]);
}

#[test]
fn conformance_json_to_stdout_is_nothing_but_json() {
    let folder = Folder::new();
    let outcome = folder.rmsnorm(&["conformance", "--case", "x", "--json", "-"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""));
    let outcome = folder.rmsnorm(&["conformance", "--profile", "smoke", "--most-cases", "20", "--json", "-"]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert!(outcome.stdout.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
    assert!(folder.names().is_empty());
}
