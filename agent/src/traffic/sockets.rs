//! On which TCP addresses a process listens, in its own network namespace.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// File descriptors of a process that are looked at. A server holds its listening socket since its
/// start, among the first.
const MAX_DESCRIPTORS: usize = 16_384;
/// Listening sockets of a namespace that are looked at; and what a line of `/proc/net/tcp` takes.
const MAX_LISTENING: usize = 8192;
const LINE: usize = 256;

/// Addresses that lead to the process from inside its namespace, in order.
pub fn listening(pid: u32) -> Vec<SocketAddr> {
    let own = socket_inodes(pid);
    if own.is_empty() {
        return Vec::new();
    }
    let mut found: Vec<_> = ["tcp", "tcp6"]
        .iter()
        .flat_map(|table| listening_in(&format!("/proc/{pid}/net/{table}")))
        .filter(|(_, inode)| own.contains(inode))
        .map(|(address, _)| reachable(address))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Inodes of the sockets that a process has open.
fn socket_inodes(pid: u32) -> HashSet<u64> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return HashSet::new();
    };
    entries
        .flatten()
        .take(MAX_DESCRIPTORS)
        .filter_map(|entry| {
            let link = fs::read_link(entry.path()).ok()?;
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            inode.parse().ok()
        })
        .collect()
}

/// The kernel lists listening sockets before all others, of which there may be very many: what
/// follows the last of them is not read.
fn listening_in(path: &str) -> Vec<(SocketAddr, u64)> {
    let Ok(file) = File::open(path) else {
        return Vec::new();
    };
    let most = ((MAX_LISTENING + 1) * LINE) as u64;
    BufReader::with_capacity(4096, file.take(most))
        .lines()
        .skip(1)
        .map_while(|line| parse(&line.ok()?))
        .collect()
}

/// A line about a listening socket.
fn parse(line: &str) -> Option<(SocketAddr, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let local = fields.nth(1)?;
    // TCP_LISTEN of the kernel's include/net/tcp_states.h.
    if fields.nth(1)? != "0A" {
        return None;
    }
    let inode = fields.nth(5)?.parse().ok()?;
    let (address, port) = local.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // Each 32 bits are printed as a number of this machine.
    let words: Option<Vec<[u8; 4]>> = (0..address.len())
        .step_by(8)
        .map(|at| {
            let word = address.get(at..at + 8)?;
            Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
        })
        .collect();
    let address = match words?.as_slice() {
        [v4] => IpAddr::V4(Ipv4Addr::from(*v4)),
        [a, b, c, d] => {
            let bytes = [*a, *b, *c, *d].concat();
            let bytes: [u8; 16] = bytes.try_into().ok()?;
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some((SocketAddr::new(address, port), inode))
}

/// Where one connects to that listens on all addresses.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Lines in the form of the kernel's Documentation/networking/proc_net_tcp.rst.
    #[test]
    fn lines_of_the_kernel() {
        let line = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 12345 1 0000 100 0 0 10 0";
        assert_eq!(
            parse(line),
            Some(("127.0.0.1:8000".parse().unwrap(), 12345))
        );
        let established = line.replace(" 0A ", " 01 ");
        assert_eq!(parse(&established), None);
        let v6 = line.replace("0100007F", "00000000000000000000000001000000");
        assert_eq!(parse(&v6).unwrap().0, "[::1]:8000".parse().unwrap());
        let mapped = line.replace("0100007F", "0000000000000000FFFF00000100007F");
        assert_eq!(parse(&mapped).unwrap().0, "127.0.0.1:8000".parse().unwrap());
        for text in [
            "",
            "0: x",
            "0: 01:1F40 0 0A a b c d e",
            "0: é00007F:1F40 0 0A a b c d 1",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn this_process_listens_where_it_says() {
        let one = TcpListener::bind("127.0.0.1:0").unwrap();
        let all = TcpListener::bind("0.0.0.0:0").unwrap();
        let found = listening(std::process::id());
        assert!(found.contains(&one.local_addr().unwrap()));
        let port = all.local_addr().unwrap().port();
        assert!(found.contains(&SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)));
        let closed = one.local_addr().unwrap();
        drop(one);
        assert!(!listening(std::process::id()).contains(&closed));
    }
}
