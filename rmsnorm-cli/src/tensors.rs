//! Reads and writes the tensors of safetensors files.
//!
//! Files are little-endian, and so are the machines that this program supports.

mod header;

use std::cmp::Reverse;
use std::fmt::Debug;

use rmsnorm_core::quant::CodeType;
use rmsnorm_core::{AnyElement, DType, Element, Storage};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::memory;

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian, and their bytes are used as they are");

/// A parsed file: names, shapes and metadata. The elements stay in the buffer that the file was
/// read into.
#[derive(Debug)]
pub struct TensorFile<'a> {
    header: Metadata,
    elements: &'a [u8],
}

impl<'a> TensorFile<'a> {
    /// Parses the bytes of a whole file.
    ///
    /// # Errors
    /// The bytes are not a valid safetensors file.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let (header, elements) = header::split(bytes)?;
        Ok(TensorFile { header, elements })
    }

    /// The metadata with this key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// The keys of all metadata, in alphabetical order.
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.header.metadata().iter().flat_map(|text| text.keys().cloned()).collect();
        keys.sort_unstable();
        keys
    }

    /// The names of all tensors, in alphabetical order.
    pub fn names(&self) -> Vec<String> {
        let mut names = self.header.offset_keys();
        names.sort_unstable();
        names
    }

    /// The tensor called `name`, if the file has one.
    ///
    /// # Errors
    /// Its dtype is not F32, F16 or BF16.
    pub fn tensor(&self, name: &'static str) -> Result<Option<Tensor<'a>>, String> {
        let Some(TensorInfo { dtype: found, shape, data_offsets: (start, end) }) = self.header.info(name) else {
            return Ok(None);
        };
        let dtype = DType::ALL.into_iter().find(|&dtype| file_dtype(dtype) == *found);
        let dtype = dtype.ok_or_else(|| format!("{name} has dtype {found}; it must be F32, F16 or BF16"))?;
        let bytes = self.elements.get(*start..*end).ok_or_else(|| format!("{name} lies outside the file"))?;
        Ok(Some(Tensor { name, dtype, shape: shape.clone(), bytes }))
    }
}

/// The type of elements in a file. Files have no type for E8M0 scales; these are bytes.
pub fn file_dtype(storage: impl Into<Storage>) -> Dtype {
    match storage.into() {
        Storage::Float(DType::F32) => Dtype::F32,
        Storage::Float(DType::F16) => Dtype::F16,
        Storage::Float(DType::Bf16) => Dtype::BF16,
        Storage::Code(CodeType::E4m3) => Dtype::F8_E4M3,
        Storage::Code(CodeType::E5m2) => Dtype::F8_E5M2,
        Storage::Code(CodeType::Int8) => Dtype::I8,
        Storage::E8m0 => Dtype::U8,
    }
}

/// An input tensor.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Its name in the file.
    pub name: &'static str,
    /// The type of its elements.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    bytes: &'a [u8],
}

impl Tensor<'_> {
    /// A copy of the elements. `T` must be the type of [`dtype`](Self::dtype).
    ///
    /// # Errors
    /// The machine lacks the memory.
    pub fn elements<T: Element>(&self) -> Result<Vec<T>, String> {
        debug_assert_eq!(T::DTYPE, self.dtype, "{}", self.name);
        // The bytes may lie at any address of the file's buffer, so they cannot be viewed as
        // elements in place.
        let mut elements = memory::filled(self.name, T::default(), self.bytes.len() / size_of::<T>())?;
        bytemuck::cast_slice_mut(&mut elements).copy_from_slice(self.bytes);
        Ok(elements)
    }
}

/// An output tensor.
#[derive(Debug)]
pub struct OutputTensor {
    /// Its name in the file.
    pub name: &'static str,
    /// The type of its elements.
    pub storage: Storage,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    elements: Box<dyn Bytes>,
}

/// Elements of any type, as the bytes of a file.
trait Bytes: Debug {
    fn bytes(&self) -> &[u8];
}

impl<T: AnyElement> Bytes for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

impl OutputTensor {
    /// A tensor of this shape with these elements.
    pub fn new<T: AnyElement>(name: &'static str, shape: &[usize], elements: Vec<T>) -> Self {
        OutputTensor { name, storage: T::STORAGE, shape: shape.to_vec(), elements: Box::new(elements) }
    }
}

/// The parts of a file with these tensors. It has no metadata: their order in a header is not
/// fixed, and equal results must give equal files. The elements are not copied.
#[derive(Debug)]
pub struct Serialized<'a> {
    header: Vec<u8>,
    tensors: Vec<&'a OutputTensor>,
}

impl<'a> Serialized<'a> {
    /// Lays the file out as `safetensors::serialize` does, but without its copy.
    ///
    /// # Errors
    /// The tensors cannot be written as a safetensors file.
    pub fn new(tensors: &'a [OutputTensor]) -> Result<Self, String> {
        let mut tensors: Vec<&OutputTensor> = tensors.iter().collect();
        // Tensors with the widest elements come first, so that all are aligned.
        tensors.sort_by_key(|tensor| (Reverse(file_dtype(tensor.storage)), tensor.name));
        let mut end = 0;
        let info = |tensor: &&OutputTensor| {
            let start = end;
            end += tensor.elements.bytes().len();
            let (dtype, shape) = (file_dtype(tensor.storage), tensor.shape.clone());
            (tensor.name.to_owned(), TensorInfo { dtype, shape, data_offsets: (start, end) })
        };
        let infos = tensors.iter().map(info).collect();
        let header = Metadata::new(None, infos).map_err(|error| error.to_string())?;
        let mut text = serde_json::to_vec(&header).map_err(|error| error.to_string())?;
        text.resize(text.len().next_multiple_of(8), b' ');
        let len = (text.len() as u64).to_le_bytes();
        Ok(Serialized { header: [&len, text.as_slice()].concat(), tensors })
    }

    /// The parts of the file, in order.
    pub fn parts(&self) -> Vec<&[u8]> {
        let elements = self.tensors.iter().map(|tensor| tensor.elements.bytes());
        std::iter::once(self.header.as_slice()).chain(elements).collect()
    }
}

#[cfg(test)]
mod tests {
    use rmsnorm_core::{F8E4M3, bf16, f16};
    use safetensors::tensor::TensorView;

    use super::*;

    #[test]
    fn files_are_those_of_the_safetensors_crate() {
        let tensors = [
            OutputTensor::new("y", &[3], vec![f16::ONE; 3]),
            OutputTensor::new("rstd", &[], vec![0.5f32]),
            OutputTensor::new("dx", &[0, 7], Vec::<bf16>::new()),
            OutputTensor::new("dweight", &[1, 2], vec![1.0f32, -2.0]),
            OutputTensor::new("codes", &[3], vec![F8E4M3::from_bits(0x38); 3]),
            OutputTensor::new("codes_t", &[1], vec![-5i8]),
            OutputTensor::new("scales", &[2], vec![127u8; 2]),
        ];
        for tensors in [&tensors[..], &tensors[..1], &[]] {
            let view = |tensor: &'static str, of: &OutputTensor| {
                let view =
                    TensorView::new(file_dtype(of.storage), of.shape.clone(), of.elements.bytes().to_vec().leak());
                (tensor, view.unwrap())
            };
            let views: Vec<_> = tensors.iter().map(|tensor| view(tensor.name, tensor)).collect();
            let parts = Serialized::new(tensors).unwrap();
            assert_eq!(parts.parts().concat(), safetensors::serialize(views, None).unwrap());
        }
    }
}
