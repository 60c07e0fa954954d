//! Running the program in a folder of its own, and safetensors files as f64 values.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::Command;

use rmsnorm_core::conformance::testing::values;
use rmsnorm_core::reference::round_to;
use rmsnorm_core::{DType, Element, bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, View};
use tempfile::TempDir;

/// The program.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_rmsnorm");

/// What the program did.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A folder that the program runs in, gone afterwards.
pub struct Folder {
    folder: TempDir,
    has_gpu: bool,
}

impl Folder {
    /// Where the program finds no GPU: tests that need none are the same on every machine.
    pub fn new() -> Self {
        Folder { folder: TempDir::new().unwrap(), has_gpu: false }
    }

    /// Where it finds the machine's.
    pub fn with_gpu() -> Self {
        Folder { has_gpu: true, ..Folder::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path(name), bytes).unwrap();
    }

    /// The names of everything in the folder, hidden files too, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn rmsnorm(&self, args: &[&str]) -> Outcome {
        Outcome::of(self.command(PROGRAM).args(args))
    }

    /// With these variables in its environment.
    pub fn rmsnorm_with(&self, variables: &[(&str, &str)], args: &[&str]) -> Outcome {
        Outcome::of(self.command(PROGRAM).envs(variables.iter().copied()).args(args))
    }

    /// Runs a shell script, in which "$0" is the program.
    #[cfg(unix)]
    pub fn shell(&self, script: &str) -> Outcome {
        Outcome::of(self.command("sh").args(["-c", script, PROGRAM]))
    }

    /// A program that will run in the folder.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.folder.path()).env_remove("RMSNORM_TUNING");
        if !self.has_gpu {
            // wgpu is asked for what it was built without.
            command.env("CUDA_VISIBLE_DEVICES", "").env("WGPU_BACKEND", "gl");
            // Nor is a table of the user's looked for.
            command.env("RMSNORM_CACHE_DIR", "");
        } else if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
            // Mesa complains on stderr where a container has none.
            command.env("XDG_RUNTIME_DIR", self.folder.path());
        }
        command
    }
}

impl Outcome {
    fn of(command: &mut Command) -> Self {
        let output = command.output().unwrap();
        Outcome {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// A tensor whose values its dtype holds exactly.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

/// Tensors by name.
pub type Tensors = BTreeMap<&'static str, Tensor>;

impl Tensor {
    /// The kit's [`values`], other ones for each seed.
    pub fn painted(dtype: DType, shape: &[usize], seed: u64) -> Self {
        let values = values::<f32>(seed, shape.iter().product());
        let values = values.into_iter().map(|value| round_to(f64::from(value), dtype)).collect();
        Tensor { dtype, shape: shape.to_vec(), values }
    }

    pub fn bytes(&self) -> Vec<u8> {
        fn encode<E: Element>(values: &[f64]) -> Vec<u8> {
            let elements: Vec<E> = values.iter().map(|&value| E::from_f32(value as f32)).collect();
            bytemuck::cast_slice(&elements).to_vec()
        }
        match self.dtype {
            DType::F32 => encode::<f32>(&self.values),
            DType::F16 => encode::<f16>(&self.values),
            DType::Bf16 => encode::<bf16>(&self.values),
        }
    }

    fn decode(dtype: DType, shape: &[usize], bytes: &[u8]) -> Self {
        fn decode<E: Element>(bytes: &[u8]) -> Vec<f64> {
            bytemuck::pod_collect_to_vec::<u8, E>(bytes).into_iter().map(|value| f64::from(value.to_f32())).collect()
        }
        let values = match dtype {
            DType::F32 => decode::<f32>(bytes),
            DType::F16 => decode::<f16>(bytes),
            DType::Bf16 => decode::<bf16>(bytes),
        };
        Tensor { dtype, shape: shape.to_vec(), values }
    }
}

struct Encoded<'a>(&'a Tensor, Vec<u8>);

impl View for Encoded<'_> {
    fn dtype(&self) -> Dtype {
        match self.0.dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::Bf16 => Dtype::BF16,
        }
    }
    fn shape(&self) -> &[usize] {
        &self.0.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.1)
    }
    fn data_len(&self) -> usize {
        self.1.len()
    }
}

/// A safetensors file.
pub fn file(tensors: &Tensors, metadata: &[(&str, &str)]) -> Vec<u8> {
    let metadata: HashMap<String, String> = metadata.iter().map(|&(key, value)| (key.into(), value.into())).collect();
    let encoded = tensors.iter().map(|(name, tensor)| (*name, Encoded(tensor, tensor.bytes())));
    safetensors::serialize(encoded, Some(metadata)).unwrap()
}

/// A file with that header and these bytes of data, right or wrong.
pub fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The tensors of a safetensors file.
pub fn read(path: &std::path::Path) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |view: &safetensors::tensor::TensorView<'_>| {
        let name = view.dtype().to_string().to_lowercase();
        Tensor::decode(DType::from_name(&name).unwrap(), view.shape(), view.data())
    };
    file.iter().map(|(name, view)| (name.to_owned(), tensor(&view))).collect()
}
