//! `rmsnorm run` on bad input: exit code 2, one line on stderr with the reason, and no file left
//! behind.

use rmsnorm_core::DType;

use crate::support::{Folder, Tensor, Tensors, file, raw_file};

const GOOD: [(&str, &str); 2] = [("op", "rms_norm"), ("eps", "1e-6")];

/// Runs `in` to `out` in a folder with these bytes as `in`. The error line must contain each of the
/// words.
pub fn refuse(bytes: &[u8], args: &[&str], words: &[&str]) {
    let folder = Folder::new();
    folder.write("in", bytes);
    refuse_in(&folder, &[&["run", "in", "-o", "out"], args].concat(), words);
}

pub fn refuse_in(folder: &Folder, args: &[&str], words: &[&str]) {
    let before = folder.names();
    let outcome = folder.rmsnorm(args);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{args:?}: {outcome:?}");
    assert!(outcome.stderr.ends_with('\n') && outcome.stderr.lines().count() == 1, "{:?}", outcome.stderr);
    for word in words {
        assert!(outcome.stderr.contains(word), "{word:?} is not in {:?}", outcome.stderr);
    }
    assert_eq!(folder.names(), before, "{args:?}");
}

fn tensors(list: &[(&'static str, DType, &[usize])]) -> Tensors {
    list.iter().map(|&(name, dtype, shape)| (name, Tensor::painted(dtype, shape, 1))).collect()
}

fn good() -> Tensors {
    tensors(&[("x", DType::F32, &[2, 8])])
}

#[test]
fn truncated_file_is_refused_at_every_length() {
    let whole = file(&good(), &GOOD);
    for len in 0..whole.len() {
        let telling = if len < 8 || len < whole.len() - 64 { "ends within its header" } else { "shorter" };
        refuse(&whole[..len], &[], &["in: ", telling, "truncated"]);
    }
    refuse(&[&whole, &b"tail"[..]].concat(), &[], &["shorter or longer than its header says"]);
}

#[test]
fn other_files_are_refused() {
    refuse(b"PK\x03\x04 this is no safetensors file at all", &[], &["not a valid safetensors file"]);
    refuse(&raw_file("{\"x\": [1, 2\n]}", &[]), &[], &["not a valid safetensors file"]);
    refuse(&raw_file("\u{1b}[31m not json", &[]), &[], &["not a valid safetensors file"]);
    let overlapping = r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    refuse(&raw_file(overlapping, &[0; 12]), &[], &["not a valid safetensors file"]);
    let hostile = r#"{"two\nlines\u001b[31m":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    refuse(&raw_file(hostile, &[0; 12]), &[], &[r"two\nlines\u{1b}[31m"]);
    let wrong_size = r#"{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#;
    refuse(&raw_file(wrong_size, &[0; 8]), &[], &["not a valid safetensors file"]);
}

#[test]
fn missing_files_and_folders_are_refused() {
    let folder = Folder::new();
    refuse_in(&folder, &["run", "absent", "-o", "out"], &["cannot read absent"]);
    refuse_in(&folder, &["run", ".", "-o", "out"], &["cannot read ."]);
}

#[test]
fn wrong_dtypes_are_refused_with_tensor_and_dtype() {
    for (name, dtype, size) in [("x", "F64", 8), ("x", "I32", 4), ("x", "F8_E4M3", 1), ("x", "BOOL", 1)] {
        let header = format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":[4],"data_offsets":[0,{}]}}}}"#, 4 * size);
        let args = ["--op", "rms_norm", "--eps", "1e-6"];
        refuse(&raw_file(&header, &vec![0; 4 * size]), &args, &[name, dtype, "F32, F16 or BF16"]);
    }
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::Bf16);
    let (x, w): (&[usize], &[usize]) = (&[2, 8], &[8]);
    let cases: [(&[_], &[&str]); 8] = [
        (&[("x", bf16, x), ("weight", f16, w)], &["weight has dtype F16", "must be F32 or BF16, like x"]),
        (&[("x", f32, x), ("residual", bf16, x)], &["residual has dtype BF16", "must be F32"]),
        (&[("x", bf16, x), ("weight", f32, w), ("bias", bf16, w)], &["bias has dtype BF16", "F32, like weight"]),
        (&[("x", bf16, x), ("dy", f32, x)], &["dy has dtype F32", "BF16, like x"]),
        (&[("x", bf16, x), ("dy", bf16, x), ("dresidual_out", f32, x)], &["dresidual_out has dtype F32", "like x"]),
        (&[("x", bf16, x), ("bias", f16, w)], &["bias has dtype F16"]),
        (&[("x", f32, x), ("weight", f16, w)], &["weight has dtype F16", "must be F32"]),
        (
            &[("x", bf16, x), ("residual", f32, x), ("dy", bf16, x), ("dresidual_out", bf16, x)],
            &["dresidual_out has dtype BF16", "F32, like residual"],
        ),
    ];
    for (list, words) in cases {
        refuse(&file(&tensors(list), &GOOD), &[], words);
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_with_both_shapes() {
    let x: (_, _, &[usize]) = ("x", DType::F32, &[2, 3, 8]);
    let cases: [(&'static str, &[usize], &[&str]); 9] = [
        ("weight", &[7], &["weight has shape [7]", "[2, 3, 8]"]),
        ("weight", &[2, 8], &["weight has shape [2, 8]", "[2, 3, 8]"]),
        ("weight", &[1, 2, 3, 8], &["weight has shape [1, 2, 3, 8]", "[2, 3, 8]"]),
        ("weight", &[], &["weight has shape []", "[2, 3, 8]"]),
        ("bias", &[1], &["bias has shape [1]", "[2, 3, 8]"]),
        ("residual", &[6, 8], &["residual has shape [6, 8]", "x has [2, 3, 8]"]),
        ("gate", &[2, 3, 4], &["gate has shape [2, 3, 4]", "x has [2, 3, 8]"]),
        ("dy", &[2, 3, 9], &["dy has shape [2, 3, 9]", "x has [2, 3, 8]"]),
        ("dresidual_out", &[8], &["dresidual_out has shape [8]", "x has [2, 3, 8]"]),
    ];
    for (name, shape, words) in cases {
        refuse(&file(&tensors(&[x, (name, DType::F32, shape)]), &GOOD), &[], words);
    }
    let both = tensors(&[x, ("weight", DType::F32, &[8]), ("bias", DType::F32, &[3, 8])]);
    refuse(&file(&both, &GOOD), &[], &["bias has shape [3, 8]", "weight has [8]"]);
}

#[test]
fn nothing_to_normalize_is_refused() {
    refuse(&file(&tensors(&[("weight", DType::F32, &[8])]), &GOOD), &[], &["no tensor x", "weight"]);
    refuse(&file(&Tensors::new(), &GOOD), &[], &["no tensor x"]);
    refuse(&file(&tensors(&[("x", DType::F32, &[])]), &GOOD), &[], &["x has no dimension"]);
    refuse(&file(&tensors(&[("x", DType::F32, &[3, 0])]), &GOOD), &[], &["[3, 0]", "at least 1"]);
    refuse(&file(&tensors(&[("x", DType::F32, &[1 << 60, 0])]), &GOOD), &[], &["at least 1"]);
    let alone = tensors(&[("x", DType::F32, &[2, 8]), ("dresidual_out", DType::F32, &[2, 8])]);
    refuse(&file(&alone, &GOOD), &[], &["dresidual_out", "needs dy"]);
}

#[test]
fn missing_op_and_eps_are_refused_with_both_ways_to_give_them() {
    let without = |key: &str| file(&good(), &GOOD.into_iter().filter(|&(k, _)| k != key).collect::<Vec<_>>());
    refuse(&without("op"), &[], &["op is missing", "--op", r#"metadata key "op""#]);
    refuse(&without("eps"), &[], &["eps is missing", "--eps", r#"metadata key "eps""#]);
}

/// An unknown name may be misspelt, or of a later version. A run that ignored it would give another
/// result.
#[test]
fn unknown_names_are_refused_with_the_nearest_known_one() {
    for (key, nearest) in [
        ("weight_ofset", "weight_offset"),
        ("weight-offset", "weight_offset"),
        ("offset", "weight_offset"),
        ("Eps", "eps"),
        ("epsilon", "eps"),
        ("eps ", "eps"),
        ("ops", "op"),
        ("castorder", "cast_order"),
        ("cast_order_2", "cast_order"),
        ("code", "codes"),
        ("pow_2", "pow2"),
        ("rounding", "mx_rounding"),
        ("keepy", "keep_y"),
        ("formt", "format"),
        ("line\nbreak", ""),
        ("", ""),
    ] {
        let words = [
            &format!("in: metadata {key:?} is not known"),
            &format!("nearest known is \"{nearest}"),
            "--allow-unknown",
        ];
        let metadata = [&GOOD[..], &[(key, "1")]].concat();
        refuse(&file(&good(), &metadata), &[], &words);
        refuse(&file(&good(), &metadata), &["--weight-offset", "1", "--codes", "e4m3"], &words);
        // Reported before other errors.
        refuse(&file(&Tensors::new(), &[(key, "1")]), &[], &words);
    }
    for (name, nearest) in [
        ("wieght", "weight"),
        ("Weight", "weight"),
        ("bais", "bias"),
        ("residual_in", "residual"),
        ("dx", "dy"),
        ("X", "x"),
    ] {
        let tensors = tensors(&[("x", DType::F32, &[2, 8]), (name, DType::F32, &[8])]);
        let words =
            [&format!("in: tensor {name:?} is not known"), &format!("nearest known is {nearest:?}"), "--allow-unknown"];
        refuse(&file(&tensors, &GOOD), &[], &words);
    }
}

#[test]
fn what_is_about_codes_is_refused_where_there_are_none() {
    for key in [
        "scale",
        "pow2",
        "mx_rounding",
        "source",
        "amax_floor",
        "amax_ceiling",
        "layout",
        "transposed",
        "columnwise",
        "keep_y",
    ] {
        let metadata = [&GOOD[..], &[(key, "1")]].concat();
        refuse(
            &file(&good(), &metadata),
            &[],
            &[&format!("metadata {key:?} applies to quantized results"), "--codes", "--allow-unknown"],
        );
    }
    let scale = tensors(&[("x", DType::F32, &[2, 8]), ("scale", DType::F32, &[1])]);
    refuse(&file(&scale, &GOOD), &[], &["tensor \"scale\" applies to quantized results", "--codes", "--allow-unknown"]);
}

#[test]
fn bad_settings_are_refused_with_their_source() {
    let cases = [
        ("op", "--op", "batch_norm", "rms_norm, layer_norm, l2_norm or l2_norm_clamped"),
        ("eps", "--eps", "small", "a number"),
        ("weight_offset", "--weight-offset", "one", "a number"),
        ("cast_order", "--cast-order", "never", "at_store, before_weight, rstd_first or weight_first"),
        ("gate", "--gate", "around", "after or before"),
        ("activation", "--activation", "swish", "silu or sigmoid"),
        ("groups", "--groups", "0", "a count of at least 1"),
        ("groups", "--groups", "two", "a count of at least 1"),
        ("out_dtype", "--out-dtype", "f64", "f32, f16 or bf16"),
    ];
    for (key, flag, value, expected) in cases {
        refuse(&file(&good(), &GOOD), &[flag, value], &[flag, value, expected]);
        let metadata: Vec<_> = GOOD.into_iter().filter(|&(k, _)| k != key).chain([(key, value)]).collect();
        refuse(&file(&good(), &metadata), &[], &[&format!("metadata \"{key}\""), value, expected]);
    }
    for (value, got) in [("nan", "NaN"), ("-1e-6", "-0.000001"), ("inf", "inf"), ("1e999", "inf")] {
        refuse(&file(&good(), &GOOD), &["--eps", value], &["eps must be finite and not negative", got]);
        refuse(&file(&good(), &[("op", "layer_norm"), ("eps", value)]), &[], &["eps must be finite", got]);
    }
    refuse(&file(&good(), &GOOD), &["--weight-offset", "-inf"], &["weight_offset must be finite", "-inf"]);
}

/// A gate needs its tensor, its place and its activation, and a gate before the norm no residual.
#[test]
fn gates_and_groups_that_do_not_fit_are_refused() {
    let shapes: [(&'static str, DType, &[usize]); 2] = [("x", DType::F32, &[2, 8]), ("gate", DType::F32, &[2, 8])];
    let gated = tensors(&shapes);
    let after = ["--gate", "after", "--activation", "silu"];
    refuse(&file(&gated, &GOOD), &[], &["there is a tensor gate", "--gate after", "--activation"]);
    refuse(&file(&gated, &GOOD), &["--gate", "after"], &["activation is missing", "--activation silu"]);
    refuse(&file(&gated, &GOOD), &["--activation", "silu"], &["an activation but no gate", "--gate after"]);
    refuse(&file(&tensors(&shapes[..1]), &GOOD), &after, &["a gate is asked for", "no tensor gate"]);
    let other = tensors(&[shapes[0], ("gate", DType::F16, &[2, 8])]);
    refuse(&file(&other, &GOOD), &after, &["gate has dtype F16", "F32, like x"]);
    let residual = tensors(&[shapes[0], shapes[1], ("residual", DType::F32, &[2, 8])]);
    let before = ["--gate", "before", "--activation", "sigmoid"];
    refuse(&file(&residual, &GOOD), &before, &["no call adds a residual to a gated x"]);
    refuse(
        &file(&gated, &GOOD),
        &[&after[..], &["--groups", "3"]].concat(),
        &["groups", "divide the 8 columns", "got 3"],
    );
}

/// Another dtype of y has an f32 on one side, and no residual, codes or gate before the norm.
#[test]
fn dtypes_of_y_that_do_not_fit_are_refused() {
    let x = |dtype| ("x", dtype, &[2usize, 8] as &[_]);
    let with = |dtype, name, of_other| file(&tensors(&[x(dtype), (name, of_other, &[2, 8])]), &GOOD);
    let bf16 = ["--out-dtype", "bf16"];
    refuse(&with(DType::F32, "residual", DType::F32), &bf16, &["out_dtype is BF16 and x is F32", "a residual"]);
    refuse(&file(&tensors(&[x(DType::F16)]), &GOOD), &bf16, &["out_dtype is BF16 and x is F16", "must be F32"]);
    refuse(&with(DType::F32, "dy", DType::F32), &bf16, &["dy has dtype F32; it must be BF16, the out_dtype"]);
    let weight = tensors(&[x(DType::Bf16), ("weight", DType::Bf16, &[8])]);
    refuse(&file(&weight, &GOOD), &["--out-dtype", "f32"], &["weight has dtype BF16", "F32", "the out_dtype"]);
    let codes = [&bf16[..], &["--codes", "int8"]].concat();
    refuse(&file(&tensors(&[x(DType::F32)]), &GOOD), &codes, &["out_dtype", "codes", "leave one of them out"]);
    let before = [&bf16[..], &["--gate", "before", "--activation", "silu"]].concat();
    refuse(&with(DType::F32, "gate", DType::Bf16), &before, &["gate before the norm", "another dtype than x"]);
}

#[test]
fn missing_backends_are_refused() {
    refuse(&file(&good(), &GOOD), &["--backend", "tpu"], &["cpu, cuda and wgpu", "tpu"]);
    refuse(&file(&good(), &GOOD), &["--backend", "wgpu"], &["the wgpu backend is not available: "]);
    refuse(&file(&good(), &GOOD), &["--backend", "cuda"], &["the cuda backend is not available: "]);
    refuse(&file(&good(), &GOOD), &["--backend", "cuda:one"], &["cuda:N", "cuda:one"]);
}

#[test]
fn nothing_to_warm_is_refused() {
    let folder = Folder::new();
    for (args, words) in [
        (&["warm", "--cols", "64"] as &[_], &["no GPU", "rmsnorm devices"] as &[_]),
        (&["warm", "--cols", "64", "--backend", "cuda"], &["cuda"]),
        (&["warm", "--cols", "64", "--dtype", "f64"], &["--dtype", "f32, f16, bf16", "f64"]),
        (&["warm", "--cols", "64", "--norm", "batch_norm"], &["--norm", "rms_norm", "batch_norm"]),
        (&["warm", "--cols", "64", "--op", "sideways"], &["--op", "backward", "sideways"]),
        (&["warm", "--cols", "64", "--quant", "row"], &["--quant", "quantized_forward"]),
        (&["warm", "--cols", "64", "--gpu", "h200,v100"], &["--gpu", "a100, h100, h200, t4", "v100"]),
        (&["warm", "--cols", "64", "--gpu", "h200"], &["no cache folder", "RMSNORM_CACHE_DIR"]),
    ] {
        refuse_in(&folder, args, words);
    }
    // The cpu backend compiles nothing.
    let outcome = folder.rmsnorm(&["warm", "--cols", "64", "--backend", "cpu"]);
    let seconds = outcome.stdout.strip_prefix("cpu    ready after ").and_then(|rest| rest.strip_suffix(" s\n"));
    assert!(outcome.code == Some(0) && seconds.is_some_and(|seconds| seconds.parse::<f64>().is_ok()), "{outcome:?}");
}

#[test]
fn outputs_that_cannot_be_written_are_refused() {
    let folder = Folder::new();
    folder.write("in", &file(&good(), &GOOD));
    std::fs::create_dir(folder.path("sub")).unwrap();
    let cases: [(&str, &[&str]); 5] = [
        ("sub", &["cannot write sub", "folder"]),
        ("sub/..", &["cannot write sub/..", "folder"]),
        ("absent/out", &["cannot write absent/out", "no folder absent"]),
        ("in/out", &["cannot write in/out", "no folder in"]),
        ("/dev/null", &["cannot write /dev/null", "not a regular file"]),
    ];
    for (output, words) in cases {
        refuse_in(&folder, &["run", "in", "-o", output], words);
    }
    // No user can create files here, not even root.
    #[cfg(target_os = "linux")]
    refuse_in(&folder, &["run", "in", "-o", "/proc/self/out"], &["cannot write /proc/self/out"]);
}

#[test]
fn failed_run_leaves_an_older_output_alone() {
    let folder = Folder::new();
    folder.write("in", &file(&good(), &GOOD));
    folder.write("out", b"older");
    refuse_in(&folder, &["run", "in", "-o", "out", "--eps", "nan"], &["eps"]);
    assert_eq!(std::fs::read(folder.path("out")).unwrap(), b"older");
}
