//! Verdicts and evaluations to rows.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanBuilder, Float64Builder, Int32Builder, Int64Builder, RecordBatch,
    StringBuilder, TimestampMicrosecondBuilder,
};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use datafusion::error::Result;
use vramscope_leaks::design::Clock;
use vramscope_leaks::{Evaluation, Report, Settings, Verdict};

use super::Output;
use super::decode::{Collected, StackKey};

/// A column's builder.
enum Column {
    Int(Int64Builder),
    Small(Int32Builder),
    Float(Float64Builder),
    Text(StringBuilder),
    Time(TimestampMicrosecondBuilder),
    Flag(BooleanBuilder),
}

/// A value of a row.
enum Cell {
    Int(Option<i64>),
    Small(Option<i32>),
    Float(Option<f64>),
    Text(Option<String>),
    /// Microseconds since 1970.
    Time(Option<i64>),
    Flag(Option<bool>),
}

fn time() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))
}

/// A column's name, and how to make its type.
type Named = (&'static str, fn() -> DataType);

const KEY: [Named; 5] = [
    ("process_id", || DataType::Int64),
    ("stack_id", || DataType::Int64),
    ("device", || DataType::Int32),
    ("memory_kind", || DataType::Utf8),
    ("layer", || DataType::Utf8),
];

/// The columns of an output.
pub(super) fn schema(output: Output) -> SchemaRef {
    let own: Vec<(&str, DataType)> = match output {
        Output::Verdicts => verdict_columns(),
        Output::Evaluations => evaluation_columns(),
    };
    let key = KEY.iter().map(|(name, of)| (*name, of()));
    let fields = key.chain(own).map(|(name, of)| Field::new(name, of, true));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

fn verdict_columns() -> Vec<(&'static str, DataType)> {
    use DataType::{Float64, Int64, Utf8};
    vec![
        ("tier", Utf8),
        ("detector", Utf8),
        ("bytes_per_request", Float64),
        ("bytes_per_request_low", Float64),
        ("bytes_per_request_high", Float64),
        ("bytes_per_hour", Float64),
        ("bytes_per_hour_low", Float64),
        ("bytes_per_hour_high", Float64),
        ("minimum_detectable_bytes_per_request", Float64),
        ("live_bytes", Int64),
        ("live_count", Int64),
        ("growth_bytes", Int64),
        ("oldest_live_age_seconds", Float64),
        ("survivor_bytes", Int64),
        ("monotonic_share", Float64),
        ("plateau_bytes", Int64),
        ("first_seen", time()),
        ("confirmed_at", time()),
        ("since", time()),
        ("until", time()),
        ("requests", Float64),
        ("reason", Utf8),
        ("settled_by", Utf8),
        ("statistics", Utf8),
        ("traffic_scope", Utf8),
        ("lossy_windows", Int64),
    ]
}

fn evaluation_columns() -> Vec<(&'static str, DataType)> {
    use DataType::{Boolean, Float64, Int64, Utf8};
    vec![
        ("evaluated_at", time()),
        ("window_start", time()),
        ("window_hours", Float64),
        ("clock", Utf8),
        ("requests", Float64),
        ("growth_bytes", Float64),
        ("standard_error_bytes", Float64),
        ("growth_low_bytes", Float64),
        ("growth_high_bytes", Float64),
        ("detectable_bytes", Float64),
        ("kendall_tau", Float64),
        ("residual_correlation", Float64),
        ("remaining_share", Float64),
        ("largest_rise_share", Float64),
        ("block_slope_share", Float64),
        ("four_block_slope_share", Float64),
        ("drawdown_share", Float64),
        ("last_third_share", Float64),
        ("new_high_share", Float64),
        ("monotonic_share", Float64),
        ("rival", Utf8),
        ("passes", Boolean),
        ("suspect", Boolean),
        ("confirming", Boolean),
        ("passes_in_a_row", Int64),
        ("fails", Utf8),
    ]
}

/// Rows of an output.
pub(super) struct Rows {
    output: Output,
    columns: Vec<Column>,
}

impl Rows {
    pub fn new(output: Output) -> Self {
        let schema = schema(output);
        let columns = schema.fields().iter().map(|field| match field.data_type() {
            DataType::Int64 => Column::Int(Int64Builder::new()),
            DataType::Int32 => Column::Small(Int32Builder::new()),
            DataType::Float64 => Column::Float(Float64Builder::new()),
            DataType::Boolean => Column::Flag(BooleanBuilder::new()),
            DataType::Timestamp(..) => Column::Time(TimestampMicrosecondBuilder::new()),
            _ => Column::Text(StringBuilder::new()),
        });
        Rows {
            output,
            columns: columns.collect(),
        }
    }

    pub fn add(&mut self, settings: &Settings, process: &Collected, report: &Report) {
        match self.output {
            Output::Verdicts => {
                for verdict in &report.verdicts {
                    let key = &process.input.stacks[verdict.stack].0;
                    let cells = of_verdict(settings, process, report, verdict);
                    self.push(key_cells(process.id, key).into_iter().chain(cells));
                }
            }
            Output::Evaluations => {
                for evaluation in &report.evaluations {
                    let key = &process.input.stacks[evaluation.stack].0;
                    let cells = of_evaluation(settings, evaluation);
                    self.push(key_cells(process.id, key).into_iter().chain(cells));
                }
            }
        }
    }

    fn push(&mut self, cells: impl Iterator<Item = Cell>) {
        for (column, cell) in self.columns.iter_mut().zip(cells) {
            match (column, cell) {
                (Column::Int(to), Cell::Int(value)) => to.append_option(value),
                (Column::Small(to), Cell::Small(value)) => to.append_option(value),
                (Column::Float(to), Cell::Float(value)) => {
                    to.append_option(value.filter(|v| v.is_finite()));
                }
                (Column::Text(to), Cell::Text(value)) => to.append_option(value),
                (Column::Time(to), Cell::Time(value)) => to.append_option(value),
                (Column::Flag(to), Cell::Flag(value)) => to.append_option(value),
                // The lists of columns and of cells stand side by side, and a test compares them.
                _ => unreachable!("a cell of another type than its column"),
            }
        }
    }

    pub fn finish(self, projection: Option<&[usize]>) -> Result<RecordBatch> {
        let arrays = self.columns.into_iter().map(|column| -> ArrayRef {
            match column {
                Column::Int(mut of) => Arc::new(of.finish()),
                Column::Small(mut of) => Arc::new(of.finish()),
                Column::Float(mut of) => Arc::new(of.finish()),
                Column::Text(mut of) => Arc::new(of.finish()),
                Column::Time(mut of) => Arc::new(of.finish().with_timezone("UTC")),
                Column::Flag(mut of) => Arc::new(of.finish()),
            }
        });
        let batch = RecordBatch::try_new(schema(self.output), arrays.collect())?;
        match projection {
            Some(columns) => Ok(batch.project(columns)?),
            None => Ok(batch),
        }
    }
}

fn key_cells(process_id: i64, key: &StackKey) -> [Cell; 5] {
    [
        Cell::Int(Some(process_id)),
        Cell::Int(key.stack_id),
        Cell::Small(key.device),
        Cell::Text(Some(key.memory_kind.clone())),
        Cell::Text(Some(key.layer.clone())),
    ]
}

fn at(settings: &Settings, slot: i64) -> Cell {
    Cell::Time(Some(slot * settings.slot_ns() / 1000))
}

fn of_verdict(
    settings: &Settings,
    process: &Collected,
    report: &Report,
    verdict: &Verdict,
) -> Vec<Cell> {
    let time = |slot: Option<i64>| match slot {
        Some(slot) => at(settings, slot),
        None => Cell::Time(None),
    };
    let bytes = |value: f64| Cell::Int(Some(value.round() as i64));
    let text = |value: &str| Cell::Text(Some(value.to_string()));
    let (request, hour) = (verdict.per_request, verdict.per_hour);
    let scope = match process.scope {
        1 => Some("process"),
        2 => Some("pod"),
        3 => Some("container"),
        4 => Some("host"),
        _ => None,
    };
    let mut statistics = verdict.statistics.clone();
    if process.scope > 1 && !statistics.is_empty() {
        statistics.push_str(&format!("; traffic of the {}", scope.unwrap_or_default()));
    }
    if process.lossy > 0 && !statistics.is_empty() {
        statistics.push_str(&format!(
            "; {} of the process's windows lost events",
            process.lossy
        ));
    }
    vec![
        text(verdict.tier.name()),
        text(verdict.detector.name()),
        Cell::Float(request.map(|r| r.value)),
        Cell::Float(request.map(|r| r.low)),
        Cell::Float(request.map(|r| r.high)),
        Cell::Float(hour.map(|r| r.value)),
        Cell::Float(hour.map(|r| r.low)),
        Cell::Float(hour.map(|r| r.high)),
        Cell::Float(verdict.detectable_per_request),
        bytes(verdict.live_bytes),
        Cell::Int(Some(verdict.live_count)),
        bytes(verdict.growth),
        Cell::Float(verdict.oldest_age_hours.map(|hours| hours * 3600.0)),
        bytes(verdict.survivors),
        Cell::Float(verdict.monotonic),
        Cell::Int(verdict.plateau.map(|bytes| bytes.round() as i64)),
        time(verdict.first_seen),
        time(verdict.confirmed_at),
        time(verdict.since),
        time((report.end != 0).then_some(report.end)),
        Cell::Float(report.requests),
        Cell::Text(verdict.reason.clone()),
        Cell::Text(verdict.settled_by.map(str::to_string)),
        Cell::Text(Some(statistics).filter(|s| !s.is_empty())),
        Cell::Text(scope.map(str::to_string)),
        Cell::Int(Some(process.lossy)),
    ]
}

fn of_evaluation(settings: &Settings, evaluation: &Evaluation) -> Vec<Cell> {
    let judged = &evaluation.judged;
    let shares = &judged.shares;
    let float = |value: f64| Cell::Float(Some(value));
    let block_slots = vramscope_leaks::settings::SLOTS_PER_BLOCK;
    let start = evaluation.at - judged.len as i64 * block_slots;
    let hours = judged.len as f64 * f64::from(settings.block_minutes) / 60.0;
    let has_requests = judged.requests > 0.0;
    vec![
        at(settings, evaluation.at),
        at(settings, start),
        float(hours),
        Cell::Text(Some(match judged.clock {
            Clock::Requests => "requests".to_string(),
            Clock::Time => "time".to_string(),
        })),
        Cell::Float(has_requests.then_some(judged.requests)),
        float(judged.plain.growth),
        float(judged.plain.error),
        float(judged.low),
        float(judged.high),
        float(judged.detectable),
        float(judged.tau),
        float(judged.rho),
        float(judged.remaining),
        float(shares.largest_rise),
        float(shares.block_slope),
        float(shares.four_block_slope),
        float(shares.drawdown),
        float(shares.last_third),
        float(shares.new_high),
        float(judged.monotonic),
        Cell::Text(judged.rival.map(|shape| shape.to_string())),
        Cell::Flag(Some(judged.passes())),
        Cell::Flag(Some(evaluation.suspicious)),
        Cell::Flag(Some(evaluation.confirming)),
        Cell::Int(Some(evaluation.in_a_row as i64)),
        Cell::Text(judged.fails.map(|failing| failing.to_string())),
    ]
}
