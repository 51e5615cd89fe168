//! Failed attempts, by address: counted, logged, and slowed down.
//!
//! Invariants:
//! - a token, whose 256 random bits cannot be guessed, is always looked at: who sits behind the
//!   same address as an attacker is not locked out with it;
//! - passwords, which can be guessed, are not looked at for a while after [`FREE`] failures: a
//!   second, then twice as long each time, up to [`LONGEST`];
//! - what is remembered is bounded by [`MAX_ADDRESSES`], the log to a line for each power of two.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Denied;
use crate::metrics::{DoorLabels, METRICS};

/// Failures without consequences.
pub const FREE: u32 = 5;
/// Longest time for which passwords are not looked at.
pub const LONGEST: Duration = Duration::from_secs(60);
/// Addresses at most; the one that was quiet longest goes.
pub const MAX_ADDRESSES: usize = 10_000;
/// A failure is forgotten after so long without another.
const FORGOTTEN: Duration = Duration::from_secs(15 * 60);
/// How late a failed attempt is answered.
const LATE: Duration = Duration::from_millis(250);

/// The failed attempts.
#[derive(Debug, Default)]
pub struct Throttle {
    addresses: Mutex<HashMap<IpAddr, Failures>>,
}

#[derive(Debug, Clone, Copy)]
struct Failures {
    count: u32,
    last: Instant,
    closed_until: Instant,
}

/// Who has one IPv6 address has the 2^64 beside it.
fn whole(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        address => address,
    }
}

impl Throttle {
    /// Whether a password from there is looked at now.
    pub fn admit(&self, from: IpAddr) -> Result<(), Denied> {
        let now = Instant::now();
        match self.addresses().get(&whole(from)) {
            Some(failures) if failures.closed_until > now => {
                let left = failures.closed_until - now;
                Err(Denied::TooOften(left.as_secs() + 1))
            }
            _ => Ok(()),
        }
    }

    /// A failed attempt. Gives how long its answer has to wait. `who` may be anything that was
    /// sent: it is cut for the log.
    pub fn failed(&self, from: IpAddr, door: &'static str, who: &str) -> Duration {
        METRICS
            .access
            .denied
            .get_or_create(&DoorLabels { door })
            .inc();
        let now = Instant::now();
        let count = {
            let mut addresses = self.addresses();
            if addresses.len() >= MAX_ADDRESSES && !addresses.contains_key(&whole(from)) {
                addresses.retain(|_, failures| now - failures.last < FORGOTTEN);
            }
            if addresses.len() >= MAX_ADDRESSES && !addresses.contains_key(&whole(from)) {
                let quiet = addresses.iter().min_by_key(|(_, failures)| failures.last);
                if let Some(quiet) = quiet.map(|(address, _)| *address) {
                    addresses.remove(&quiet);
                }
            }
            let failures = addresses.entry(whole(from)).or_insert(Failures {
                count: 0,
                last: now,
                closed_until: now,
            });
            if now - failures.last >= FORGOTTEN {
                failures.count = 0;
            }
            failures.count = failures.count.saturating_add(1);
            failures.last = now;
            failures.closed_until = now + closed_for(failures.count);
            failures.count
        };
        if count.is_power_of_two() {
            let who: String = who.chars().take(64).collect();
            tracing::warn!(%from, door, who, count, "wrong credentials");
        }
        LATE
    }

    /// Somebody came in from there with a password.
    pub fn succeeded(&self, from: IpAddr) {
        self.addresses().remove(&whole(from));
    }

    fn addresses(&self) -> std::sync::MutexGuard<'_, HashMap<IpAddr, Failures>> {
        let addresses = self.addresses.lock();
        addresses.unwrap_or_else(PoisonError::into_inner)
    }
}

fn closed_for(count: u32) -> Duration {
    match count.checked_sub(FREE) {
        None => Duration::ZERO,
        Some(beyond) => Duration::from_secs(1 << beyond.min(6)).min(LONGEST),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fifth_failure_closes_for_a_second_and_each_more_for_twice_as_long() {
        let seconds: Vec<u64> = (1..=13).map(|count| closed_for(count).as_secs()).collect();
        assert_eq!(seconds, [0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }

    #[test]
    fn an_address_is_closed_for_itself_and_its_ipv6_neighbours() {
        let throttle = Throttle::default();
        let here: IpAddr = "2001:db8::1".parse().unwrap();
        for _ in 0..4 {
            throttle.failed(here, "http", "eve");
            assert_eq!(throttle.admit(here), Ok(()));
        }
        // Some more: the fifth closes for a second only, which a slow machine may sleep through.
        for _ in 0..6 {
            throttle.failed(here, "http", "eve");
        }
        assert!(matches!(throttle.admit(here), Err(Denied::TooOften(_))));
        assert!(throttle.admit("2001:db8::ffff".parse().unwrap()).is_err());
        assert!(throttle.admit("2001:db8:0:1::1".parse().unwrap()).is_ok());
        assert!(throttle.admit("192.0.2.1".parse().unwrap()).is_ok());
        throttle.succeeded(here);
        assert_eq!(throttle.admit(here), Ok(()));
    }

    #[test]
    fn addresses_are_bounded() {
        let throttle = Throttle::default();
        for n in 0..u32::try_from(MAX_ADDRESSES).unwrap() + 100 {
            throttle.failed(IpAddr::V4(n.into()), "http", "eve");
        }
        assert_eq!(throttle.addresses().len(), MAX_ADDRESSES);
    }
}
