//! How much of an array is its own: bytes of its values, without what it shares with the arrays that
//! it was cut from.

use arrow::array::{Array, ArrayRef, AsArray, OffsetSizeTrait};
use arrow::datatypes::{
    ArrowNativeType, BinaryType, ByteArrayType, DataType, LargeBinaryType, LargeUtf8Type, Utf8Type,
};

/// Bytes of all values.
pub(crate) fn bytes(values: &ArrayRef) -> u64 {
    let rows = values.len() as u64;
    let offsets = |bytes: u64, each: u64| bytes + (rows + 1) * each;
    match values.data_type() {
        DataType::Utf8 => offsets(span::<Utf8Type>(values), 4),
        DataType::Binary => offsets(span::<BinaryType>(values), 4),
        DataType::LargeUtf8 => offsets(span::<LargeUtf8Type>(values), 8),
        DataType::LargeBinary => offsets(span::<LargeBinaryType>(values), 8),
        DataType::Utf8View => offsets(views(values.as_string_view().views()), 16),
        DataType::BinaryView => offsets(views(values.as_binary_view().views()), 16),
        DataType::List(_) => offsets(items::<i32>(values), 4),
        DataType::LargeList(_) => offsets(items::<i64>(values), 8),
        DataType::Struct(_) => values.as_struct().columns().iter().map(bytes).sum(),
        // Of the rest nothing is shared that would be large.
        _ => {
            let whole = values.get_array_memory_size();
            let own = values.to_data().get_slice_memory_size();
            own.unwrap_or(whole) as u64
        }
    }
}

/// Bytes of the largest value.
pub(crate) fn largest(values: &ArrayRef) -> u64 {
    let longest = match values.data_type() {
        DataType::Utf8 => longest::<Utf8Type>(values),
        DataType::LargeUtf8 => longest::<LargeUtf8Type>(values),
        DataType::Utf8View => values.as_string_view().lengths().max().map(u64::from),
        found => match found.primitive_width() {
            Some(width) => Some(width as u64),
            None => Some(bytes(values)),
        },
    };
    longest.unwrap_or(0)
}

fn span<T: ByteArrayType>(values: &ArrayRef) -> u64 {
    let offsets = values.as_bytes::<T>().value_offsets();
    match (offsets.first(), offsets.last()) {
        (Some(first), Some(last)) => (last.as_usize() - first.as_usize()) as u64,
        _ => 0,
    }
}

fn longest<T: ByteArrayType>(values: &ArrayRef) -> Option<u64> {
    let offsets = values.as_bytes::<T>().value_offsets();
    let lengths = offsets.windows(2).map(|pair| pair[1] - pair[0]);
    lengths.max().map(|length| length.as_usize() as u64)
}

/// The lower half of a view is its length.
fn views(views: &[u128]) -> u64 {
    views.iter().map(|view| u64::from(*view as u32)).sum()
}

fn items<O: OffsetSizeTrait>(values: &ArrayRef) -> u64 {
    let lists = values.as_list::<O>();
    let offsets = lists.value_offsets();
    match (offsets.first(), offsets.last()) {
        (Some(first), Some(last)) => {
            let (first, last) = (first.as_usize(), last.as_usize());
            bytes(&lists.values().slice(first, last - first))
        }
        _ => 0,
    }
}
