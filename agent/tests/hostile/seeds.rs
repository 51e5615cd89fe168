//! Valid inputs to spoil. Small, so that a spoiled byte is likely one that matters.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, new_null_array};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use vramscope_agent::probes::hooks::HOOKS;
use vramscope_agent::spool::journal::{Frame, Journal, State};
use vramscope_wire::{Table, parquet_file};

/// A little of everything a parser of libraries looks at: a segment, a dynamic symbol of each of
/// two hooked functions, and a USDT note with its base.
pub fn elf() -> Vec<u8> {
    let names = [HOOKS[0].symbol, HOOKS[1].symbol];
    let mut strings = vec![0];
    let mut symbols = vec![0; 24];
    for (i, name) in names.iter().enumerate() {
        let at = strings.len() as u32;
        strings.extend(name.as_bytes());
        strings.push(0);
        symbols.extend(at.to_le_bytes());
        // A global function in section 1.
        symbols.extend([0x12, 0, 1, 0]);
        symbols.extend((0x1100 + 16 * i as u64).to_le_bytes());
        symbols.extend(16u64.to_le_bytes());
    }
    let mut desc = Vec::new();
    for value in [0x1200u64, 0x1180, 0x1300] {
        desc.extend(value.to_le_bytes());
    }
    desc.extend(b"pytorch\0malloc\08@%rax -4@%edi\0");
    let mut note = Vec::new();
    for value in [8, desc.len() as u32, 3] {
        note.extend(value.to_le_bytes());
    }
    note.extend(b"stapsdt\0");
    note.extend(&desc);
    note.resize(note.len().next_multiple_of(4), 0);

    let section_names = b"\0.text\0.dynsym\0.dynstr\0.note.stapsdt\0.stapsdt.base\0.shstrtab\0";
    let name_at = |name: &[u8]| {
        let found = section_names
            .windows(name.len())
            .position(|window| window == name);
        found.unwrap() as u32
    };
    // Header, one program header, then the sections' bytes, then their headers.
    let mut bytes = vec![0; 64 + 56];
    let mut place = |part: &[u8]| {
        let at = bytes.len() as u64;
        bytes.extend(part);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        (at, part.len() as u64)
    };
    let parts = [
        (
            &b".text"[..],
            1u32,
            0x1100u64,
            place(&[0x90; 32]),
            0u32,
            0u64,
        ),
        (b".dynsym", 11, 0, place(&symbols), 3, 24),
        (b".dynstr", 3, 0, place(&strings), 0, 0),
        (b".note.stapsdt", 7, 0, place(&note), 0, 0),
        (b".stapsdt.base", 1, 0x1180, place(&[0]), 0, 0),
        (b".shstrtab", 3, 0, place(section_names), 0, 0),
    ];
    let headers_at = bytes.len() as u64;
    bytes.resize(bytes.len() + 64, 0);
    for (name, kind, address, (offset, size), link, entry) in parts {
        bytes.extend(name_at(name).to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(2u64.to_le_bytes());
        for value in [address, offset, size] {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(link.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
        bytes.extend(8u64.to_le_bytes());
        bytes.extend(entry.to_le_bytes());
    }
    let size = bytes.len() as u64;
    let mut header = b"\x7fELF\x02\x01\x01".to_vec();
    header.resize(16, 0);
    header.extend(3u16.to_le_bytes());
    header.extend(62u16.to_le_bytes());
    header.extend(1u32.to_le_bytes());
    for value in [0, 64, headers_at] {
        header.extend(value.to_le_bytes());
    }
    header.extend(0u32.to_le_bytes());
    for value in [64u16, 56, 1, 64, 7, 6] {
        header.extend(value.to_le_bytes());
    }
    // PT_LOAD, readable and executable: addresses from 0x1000 lie at offset 0.
    header.extend(1u32.to_le_bytes());
    header.extend(5u32.to_le_bytes());
    for value in [0, 0x1000, 0x1000, size, size, 0x1000] {
        header.extend(value.to_le_bytes());
    }
    bytes[..header.len()].copy_from_slice(&header);
    bytes
}

pub fn maps() -> Vec<u8> {
    std::fs::read("/proc/self/maps").unwrap()
}

/// A record of each kind, as the kernel side lays them out.
pub fn records() -> Vec<Vec<u8>> {
    use vramscope_ebpf_abi::{
        CallStack, KIND_CALL, KIND_CALL_STACK, KIND_EXEC, KIND_EXIT, Process,
    };
    let words = |kind: u32, size: usize| {
        let mut bytes = vec![1; size];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        // Hook 0 of the table.
        bytes[4..8].copy_from_slice(&0u32.to_le_bytes());
        bytes
    };
    vec![
        words(KIND_CALL, size_of::<vramscope_ebpf_abi::Call>()),
        words(KIND_CALL_STACK, size_of::<CallStack>()),
        words(KIND_EXEC, size_of::<Process>()),
        words(KIND_EXIT, size_of::<Process>()),
    ]
}

/// A column of a type, filled with something.
fn column(data_type: &DataType, nullable: bool) -> ArrayRef {
    if nullable {
        return new_null_array(data_type, 3);
    }
    let numbers: ArrayRef = Arc::new(arrow::array::Int64Array::from(vec![1, 2, 3]));
    if let DataType::List(element) = data_type {
        let values = new_null_array(element.data_type(), 6);
        let offsets = arrow::buffer::OffsetBuffer::from_lengths([1, 2, 3]);
        let list =
            arrow::array::ListArray::try_new(Arc::clone(element), offsets, values, None).unwrap();
        return Arc::new(list);
    }
    cast(&numbers, data_type).unwrap()
}

/// A file of each table, behind the byte that chooses it.
pub fn spool_files() -> Vec<Vec<u8>> {
    let tables = Table::ALL.into_iter().enumerate();
    tables
        .map(|(i, table)| {
            let schema = table.schema();
            let columns = schema
                .fields()
                .iter()
                .map(|field| column(field.data_type(), field.is_nullable()))
                .collect();
            let batch = RecordBatch::try_new(Arc::clone(&schema), columns).unwrap();
            assert_eq!(batch.column(0).len(), 3);
            let mut bytes = vec![i as u8];
            bytes.extend(parquet_file::encode(table, &[batch]).unwrap());
            bytes
        })
        .collect()
}

/// A journal of two frames.
pub fn journals() -> Vec<Vec<u8>> {
    let spool = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(spool.path()).unwrap();
    let frame = |next_batch_seq| Frame {
        state: State {
            next_batch_seq,
            lost_reported: vec![1; 6],
            boot_id: "0b6a6c9e-7b0e-4d0b-8f7e-0c1f0f1c2d3e".into(),
            ..State::default()
        },
        changes: Vec::new(),
        stacks: vec![1, -2, i64::MAX],
    };
    journal.rewrite(&frame(1)).unwrap();
    journal.append(&frame(2)).unwrap();
    vec![std::fs::read(spool.path().join("journal")).unwrap()]
}

/// Makes the frames' checksums fit, so that what they hold is decoded.
pub fn right_checksums(bytes: &mut [u8]) {
    let mut at = 8;
    while let Some(header) = bytes.get(at..at + 8) {
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let end = (at + 8).saturating_add(length).min(bytes.len());
        // A length beyond the end is the whole rest.
        let rest = ((end - at - 8) as u32).to_le_bytes();
        bytes[at..at + 4].copy_from_slice(&rest);
        let crc = crc32fast::hash(&bytes[at + 8..end]).to_le_bytes();
        bytes[at + 4..at + 8].copy_from_slice(&crc);
        at = end;
    }
}

pub fn configs() -> Vec<Vec<u8>> {
    let config = vramscope_agent::config::Config::default();
    vec![
        config.to_toml().into_bytes(),
        b"window = \"5min\"\nlibraries = [\"/a\"]\nspool_limit = \"1GiB\"\n".to_vec(),
    ]
}

/// Metrics pages of serving engines, a little of each.
pub fn metrics() -> Vec<Vec<u8>> {
    let pages = [
        "# TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3\n\
         vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.25\n\
         vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"m\"} 0.5\n\
         vllm:cpu_cache_usage_perc{model_name=\"m\"} 0.5\n\
         vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"301\",swap_space_bytes=\"4294967296\"} 1\n",
        "sglang:num_running_reqs{dp_rank=\"0\",model_name=\"a \\\"b\\\"\",priority=\"\",tp_rank=\"0\"} 3 1700000000000\n\
         sglang:max_total_num_tokens{dp_rank=\"0\",tp_rank=\"0\"} 8000\n\
         sglang:page_size 16\nsglang:kv_used_tokens 160\nsglang:token_usage 0.02\n",
        "nv_trt_llm_request_metrics{model=\"m\",request_type=\"active\",version=\"1\"} 7\n\
         nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"max\",model=\"m\",version=\"1\"} 6240\n\
         trtllm_kv_cache_max_blocks{model_name=\"m\"} 200\n\
         tgi_batch_current_size 6\ntgi_queue_size NaN\ntgi_request_success +Inf\n# EOF\n",
    ];
    pages.map(|page| page.as_bytes().to_vec()).into()
}
