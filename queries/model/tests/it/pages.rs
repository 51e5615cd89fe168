//! What paging a key-value cache wastes on request traces that others published: Azure's LLM
//! inference traces of 2023 and Mooncake's conversation trace.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::read::GzDecoder;
use vramscope_model::kv::{PageWaste, kv_page_waste};

use crate::shared;

const PAGES: [u64; 6] = [8, 16, 32, 64, 128, 256];

/// Percent wasted per page size, to the two digits that were published. A request holds its
/// prompt's and its answer's tokens; waste is a share of the slots of all pages.
fn percents(tokens: &[u64]) -> Vec<String> {
    PAGES
        .iter()
        .map(|page| {
            let waste = tokens.iter().map(|tokens| kv_page_waste(*tokens, *page));
            let waste: PageWaste = waste.map(Option::unwrap).sum();
            format!("{:.2}", waste.ratio().unwrap() * 100.0)
        })
        .collect()
}

fn azure(path: &Path) -> Vec<u64> {
    let lines = BufReader::new(File::open(path).unwrap()).lines();
    let rows = lines.skip(1).map(Result::unwrap);
    rows.filter(|row| !row.trim().is_empty())
        .map(|row| {
            let counts = row.split(',').skip(1);
            counts
                .map(|count| count.trim().parse::<u64>().unwrap())
                .sum()
        })
        .collect()
}

fn mooncake(path: &Path) -> Vec<u64> {
    let mut text = String::new();
    let file = File::open(path).unwrap();
    GzDecoder::new(file).read_to_string(&mut text).unwrap();
    text.lines()
        .map(|line| {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            let count = |name: &str| row[name].as_u64().unwrap();
            count("input_length") + count("output_length")
        })
        .collect()
}

#[test]
fn azure_conversation() {
    let Some(path) = shared::data("traces/azure_llm_2023_conv.csv") else {
        return;
    };
    let published = ["0.26", "0.54", "1.12", "2.21", "4.38", "8.02"];
    assert_eq!(percents(&azure(&path)), published);
}

#[test]
fn azure_code() {
    let Some(path) = shared::data("traces/azure_llm_2023_code.csv") else {
        return;
    };
    let published = ["0.17", "0.37", "0.73", "1.51", "3.04", "6.09"];
    assert_eq!(percents(&azure(&path)), published);
}

#[test]
fn mooncake_conversation() {
    let Some(path) = shared::data("traces/mooncake_conversation.jsonl.gz") else {
        return;
    };
    let published = ["0.03", "0.06", "0.12", "0.25", "0.51", "1.01"];
    assert_eq!(percents(&mooncake(&path)), published);
}
