//! What can happen to a fleet and its collector, and in which order it does.

use clap::ValueEnum;

use super::Random;

/// The one great fault of a round. The collector is started again after each that ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Fault {
    /// SIGKILL at a random moment.
    Kill,
    /// SIGKILL as soon as an acknowledgement arrives.
    KillAfterAcknowledgement,
    /// SIGKILL when a table's data file or log entry has just appeared.
    KillInCommit,
    /// SIGKILL while files of a table are merged.
    KillInCompaction,
    /// SIGKILL, and the power goes: what was not synced is gone.
    PowerCut,
    /// The same, and of what was not synced random pieces are left.
    TornPowerCut,
    /// The disk is full, and after a while it is not.
    DiskFull,
    /// The disk is full, SIGKILL, and then there is room.
    KillOnFullDisk,
    /// SIGTERM, which commits everything.
    Stop,
}

/// Small faults that come along with the great ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Connections are cut in the middle of a message.
    NetworkCut,
    /// What was on the way arrives after it was sent again.
    LateDelivery,
    /// Two streams of one agent at once, with old batches.
    Echo,
    /// Other bytes under an old name.
    Forge,
    /// An agent is killed and forgets its latest acknowledgements.
    AgentKill,
}

/// All of them.
pub const SIDES: [Side; 5] = [
    Side::NetworkCut,
    Side::LateDelivery,
    Side::Echo,
    Side::Forge,
    Side::AgentKill,
];

/// The great faults of every round: each of the possible ones in turn, in random order. Those that
/// need a disk of our own are left out where there is none.
pub fn plan(rounds: usize, only: &[Fault], has_disk: bool, random: &mut Random) -> Vec<Fault> {
    let needs_disk = |fault: &Fault| {
        matches!(
            fault,
            Fault::PowerCut | Fault::TornPowerCut | Fault::DiskFull | Fault::KillOnFullDisk
        )
    };
    let chosen = if only.is_empty() {
        Fault::value_variants()
    } else {
        only
    };
    let possible: Vec<Fault> = chosen
        .iter()
        .copied()
        .filter(|fault| has_disk || !needs_disk(fault))
        .collect();
    let mut plan = Vec::new();
    while plan.len() < rounds && !possible.is_empty() {
        let mut turn = possible.clone();
        random.shuffle(&mut turn);
        // The hardest comes first, so that a short run meets it.
        if plan.is_empty() {
            turn.sort_by_key(|fault| *fault != Fault::TornPowerCut && *fault != Fault::PowerCut);
        }
        plan.extend(turn);
    }
    plan.truncate(rounds);
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_comes_in_turn_and_the_seed_decides_the_order() {
        let of = |seed| plan(18, &[], true, &mut Random::new(seed));
        for seed in 1..20 {
            let mut first: Vec<_> = of(seed)[..9].to_vec();
            first.sort();
            assert_eq!(first, Fault::value_variants());
        }
        assert_eq!(of(5), of(5));
        assert_ne!(of(5), of(6));
    }

    #[test]
    fn without_a_disk_what_needs_one_is_left_out() {
        let planned = plan(20, &[], false, &mut Random::new(1));
        assert!(planned.contains(&Fault::Kill) && !planned.contains(&Fault::PowerCut));
        assert!(plan(3, &[Fault::PowerCut], false, &mut Random::new(1)).is_empty());
    }
}
