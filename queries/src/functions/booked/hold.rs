//! Arrays that keep a reservation of memory until nothing of them is left.

use arrow::array::{Array, ArrayData, ArrayRef, make_array};
use arrow::buffer::Buffer;
use bytes::Bytes;
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryReservation;

/// A buffer with the reservation for the array that it belongs to.
struct Held {
    buffer: Buffer,
    _memory: MemoryReservation,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_slice()
    }
}

/// The same array. The reservation hangs on its largest buffer, which slices and copies share; of an
/// array without bytes it is given back at once.
pub(super) fn hold(array: &ArrayRef, memory: MemoryReservation) -> Result<ArrayRef> {
    Ok(make_array(attach(array.to_data(), memory)?))
}

fn attach(data: ArrayData, memory: MemoryReservation) -> Result<ArrayData> {
    // Of a list or a struct nearly all lies in its items.
    if let [first, rest @ ..] = data.child_data() {
        let mut children = vec![attach(first.clone(), memory)?];
        children.extend_from_slice(rest);
        return Ok(data.into_builder().child_data(children).build()?);
    }
    let mut buffers = data.buffers().to_vec();
    let Some(largest) = buffers.iter_mut().max_by_key(|buffer| buffer.len()) else {
        return Ok(data);
    };
    if largest.is_empty() {
        return Ok(data);
    }
    *largest = Buffer::from(Bytes::from_owner(Held {
        buffer: largest.clone(),
        _memory: memory,
    }));
    Ok(data.into_builder().buffers(buffers).build()?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{AsArray, Int64Array, ListArray, NullArray, StringArray};
    use arrow::buffer::OffsetBuffer;
    use arrow::datatypes::{DataType, Field, Int64Type};
    use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryConsumer, MemoryPool};

    use super::*;

    #[test]
    fn what_is_left_of_an_array_keeps_its_memory() {
        let pool: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(1000));
        let reserve = |bytes| {
            let memory = MemoryConsumer::new("test").register(&pool);
            memory.try_grow(bytes).unwrap();
            memory
        };
        let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("one"), None, Some("three")]));
        let held = hold(&texts, reserve(100)).unwrap();
        assert_eq!(&held, &texts);
        let item = Arc::new(Field::new("item", DataType::Int64, true));
        let offsets = OffsetBuffer::from_lengths([2, 1]);
        let items: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
        let lists: ArrayRef = Arc::new(ListArray::new(item, offsets, items, None));
        let held_lists = hold(&lists, reserve(10)).unwrap();
        assert_eq!(&held_lists, &lists);
        let nothing = hold(&(Arc::new(NullArray::new(3)) as ArrayRef), reserve(5)).unwrap();
        assert_eq!((nothing.len(), pool.reserved()), (3, 110));

        let slice = held.slice(2, 1);
        drop(held);
        assert_eq!(slice.as_string::<i32>().value(0), "three");
        let second = held_lists.as_list::<i32>().value(1);
        drop(held_lists);
        assert_eq!(second.as_primitive::<Int64Type>().value(0), 3);
        assert_eq!(pool.reserved(), 110);
        drop(slice);
        assert_eq!(pool.reserved(), 10);
        drop(second);
        assert_eq!(pool.reserved(), 0);
    }
}
