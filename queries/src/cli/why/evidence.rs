//! The class of a failure in words, with the comparisons that led to it and what held the memory.

use vramscope_model::oom::{Evidence, Growth, OomClass, OomFacts, Residence};
use vramscope_queries::session::Limits;

use super::{Failure, tail};
use crate::door::Door;
use crate::text::{age, counted, size};

/// Holders that are named.
const HOLDERS: usize = 5;

pub struct Told {
    /// What the class means.
    pub meaning: &'static str,
    /// Comparisons, in the order of the decision.
    pub evidence: Vec<String>,
    /// Classes that slightly other numbers would have given.
    pub near: Vec<String>,
    pub with_growth: bool,
    pub holders_title: &'static str,
    pub holders: Vec<String>,
}

pub async fn tell(door: &mut Door, limits: Limits, failure: &Failure) -> anyhow::Result<Told> {
    let growth = failure.growth.zip(failure.growth_at_least);
    let facts = OomFacts {
        tried: failure.tried.unwrap_or_default(),
        driver_free: failure.driver_free,
        stranded: failure.stranded,
        releasable: failure.releasable,
        card_total: failure.card,
        process_used: failure.process,
        others_used: failure.others,
        growth: growth.map(|(bytes_per_request, at_least)| Growth {
            bytes_per_request,
            at_least,
        }),
        residence: residence(failure),
    };
    let verdict = facts.classify();
    let mut evidence: Vec<String> = verdict.evidence.iter().map(words).collect();
    evidence.extend(basis(failure));
    let near = verdict
        .near
        .iter()
        .map(|near| {
            format!(
                "{} more or less would have made it: {}",
                size(near.margin),
                near.class
            )
        })
        .collect();
    let (holders_title, holders) = holders(door, limits, failure, verdict.class).await?;
    Ok(Told {
        meaning: meaning(verdict.class),
        evidence,
        near,
        with_growth: verdict.with_growth,
        holders_title,
        holders,
    })
}

/// What happened within one request's residence, where the engine's load is known.
fn residence(failure: &Failure) -> Option<Residence> {
    Some(Residence {
        live_bytes_before: failure.allocated_before?,
        live_bytes_at_failure: failure.allocated?,
        queue_before: failure.waiting_before,
        queue_at_failure: failure.waiting_at_failure,
        // No engine tells the prompt tokens that it has in work.
        prefill_before: None,
        prefill_at_failure: None,
    })
}

fn meaning(class: OomClass) -> &'static str {
    match class {
        OomClass::ExternalProcess => "other processes hold most of the card",
        OomClass::DriverRefused => {
            "the driver had enough free and refused all the same: a limit (of a container, MIG, the memory fraction), memory in flight, or a request that needs more than its bytes"
        }
        OomClass::Fragmentation => {
            "enough bytes were free, but in pieces: blocks in use keep the allocator from giving them back or joining them"
        }
        OomClass::Leak => {
            "even all that was free would not have done, and what the program holds grows with each request"
        }
        OomClass::Burst => {
            "even all that was free would not have done, and one request's residence brought the jump"
        }
        OomClass::Capacity => {
            "even all that was free would not have done: the program wants more than the card has"
        }
        OomClass::Unknown => "a number that decides is not known: see below",
    }
}

fn words(evidence: &Evidence) -> String {
    match *evidence {
        Evidence::Others { others, total } => format!(
            "other processes hold {} of the card's {}",
            size(others),
            size(total)
        ),
        Evidence::DriverFree { free, tried } => format!(
            "the driver had {} free, {} were tried",
            size(free),
            size(tried)
        ),
        Evidence::Reach {
            free,
            releasable,
            stranded,
            tried,
        } => format!(
            "free in some way: {} = {} of the driver, {} that could be given back, {} stranded; {} were tried",
            size(free.saturating_add(releasable).saturating_add(stranded)),
            size(free),
            size(releasable),
            size(stranded),
            size(tried)
        ),
        Evidence::Growth {
            bytes_per_request,
            at_least,
        } => {
            format!("held bytes grew by {bytes_per_request:.0} a request, at least {at_least:.0}")
        }
        Evidence::Jump { jump, missing } => format!(
            "held bytes rose by {} within one request's residence, {} were missing",
            size(jump),
            size(missing)
        ),
        Evidence::Queue { before, after } => {
            format!("the queue went from {before} to {after} requests")
        }
        Evidence::Prefill { before, after } => {
            format!("prompt tokens in work went from {before} to {after}")
        }
        Evidence::Missing { what } => format!("not known: {what}"),
    }
}

/// Where the allocator's numbers come from.
fn basis(failure: &Failure) -> Option<String> {
    let (reserved, allocated) = (failure.reserved, failure.allocated);
    let held = match (reserved, allocated) {
        (Some(reserved), Some(allocated)) => {
            format!(
                "the allocator held {}, {} of it in use; ",
                size(reserved),
                size(allocated)
            )
        }
        _ => String::new(),
    };
    let from = match failure.allocator_basis.as_deref()? {
        "map" => "stranded bytes are from its map at the failure",
        "flushed" => {
            "it gives back what it can before it gives up, so what it held without use is stranded"
        }
        "earlier" => "stranded bytes are from its newest sample before",
        "none" => "no framework allocator is known in the process: nothing is cached",
        _ => return None,
    };
    Some(format!("{held}{from}"))
}

async fn holders(
    door: &mut Door,
    limits: Limits,
    failure: &Failure,
    class: OomClass,
) -> anyhow::Result<(&'static str, Vec<String>)> {
    match class {
        OomClass::ExternalProcess => Ok(("on the card then", others(door, limits, failure).await?)),
        OomClass::Fragmentation => Ok((
            "what holds the stranded bytes (stranded_by_segment)",
            hostages(door, limits, failure).await?,
        )),
        OomClass::Leak | OomClass::Burst | OomClass::Capacity => Ok((
            "what was held (memory_map)",
            held(door, limits, failure).await?,
        )),
        OomClass::DriverRefused | OomClass::Unknown => Ok(("", Vec::new())),
    }
}

async fn others(door: &mut Door, limits: Limits, failure: &Failure) -> anyhow::Result<Vec<String>> {
    let Some(card) = &failure.gpu_uuid else {
        return Ok(Vec::new());
    };
    let sql = format!(
        "SELECT entry['pid'] AS pid, entry['used_bytes'] AS used_bytes
         FROM (
            SELECT unnest(processes) AS entry
            FROM (SELECT processes FROM devices WHERE host = {} AND gpu_uuid = {} AND ts_ns <= {} ORDER BY ts_ns DESC LIMIT 1)
         )
         ORDER BY used_bytes DESC",
        crate::rows::quoted(&failure.host), crate::rows::quoted(card), failure.ts_ns
    );
    let rows = door.collect(&sql, limits).await?;
    let mut lines = Vec::new();
    for row in rows.iter().take(HOLDERS) {
        let pid = row.number("pid")?.unwrap_or_default();
        let used = row
            .bytes("used_bytes")?
            .map_or("not told".to_string(), size);
        let own = if pid == failure.pid {
            " (this process)"
        } else {
            ""
        };
        lines.push(format!("pid {pid}: {used}{own}"));
    }
    Ok(lines)
}

/// The map nearest to the failure: its own, or the newest before, or an import's at the end.
fn map_of(failure: &Failure) -> String {
    format!(
        "(SELECT snapshot_id FROM segments
          WHERE process_id = {process} AND device = {device}
            AND (ts_ns <= {at} + 10000000000 OR reason = 'import')
          ORDER BY ts_ns DESC LIMIT 1)",
        process = failure.process_id,
        device = failure.device.unwrap_or_default(),
        at = failure.ts_ns
    )
}

async fn hostages(
    door: &mut Door,
    limits: Limits,
    failure: &Failure,
) -> anyhow::Result<Vec<String>> {
    let sql = format!(
        "SELECT folded, count(*) AS blocks, sum(bytes) AS bytes, sum(held_bytes) AS held, max(age_seconds) AS oldest
         FROM stranded_by_segment
         WHERE process_id = {} AND device = {} AND snapshot_id = {}
         GROUP BY folded ORDER BY held DESC LIMIT {HOLDERS}",
        failure.process_id, failure.device.unwrap_or_default(), map_of(failure)
    );
    let rows = door.collect(&sql, limits).await?;
    let mut lines = Vec::new();
    for row in rows.iter() {
        let stack = row
            .text("folded")?
            .map_or("no stack".to_string(), |folded| tail(&folded));
        let blocks = row.number("blocks")?.unwrap_or_default() as usize;
        let old = row.ratio("oldest")?.map_or(String::new(), |seconds| {
            format!(", up to {} old", age(seconds))
        });
        lines.push(format!(
            "{} held by {} of {}{old}: {stack}",
            size(row.bytes("held")?.unwrap_or_default()),
            counted(blocks, "block"),
            size(row.bytes("bytes")?.unwrap_or_default())
        ));
    }
    Ok(lines)
}

async fn held(door: &mut Door, limits: Limits, failure: &Failure) -> anyhow::Result<Vec<String>> {
    let sql = format!(
        "SELECT folded, count(*) AS blocks, sum(bytes) AS bytes
         FROM memory_map
         WHERE state <> 'inactive' AND process_id = {} AND device = {} AND snapshot_id = {}
         GROUP BY folded ORDER BY bytes DESC LIMIT {HOLDERS}",
        failure.process_id,
        failure.device.unwrap_or_default(),
        map_of(failure)
    );
    let rows = door.collect(&sql, limits).await?;
    let mut lines = Vec::new();
    for row in rows.iter() {
        let stack = row
            .text("folded")?
            .map_or("no stack".to_string(), |folded| tail(&folded));
        let blocks = row.number("blocks")?.unwrap_or_default() as usize;
        let bytes = row.bytes("bytes")?.unwrap_or_default();
        lines.push(format!(
            "{} in {}: {stack}",
            size(bytes),
            counted(blocks, "block")
        ));
    }
    Ok(lines)
}
