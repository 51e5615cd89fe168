//! The network between agents and collector, which can be cut in the middle of a message, and can
//! deliver late: what was on the way arrives after the agent has given up and sent it anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, watch};

use super::Random;

/// What happens to every connection at once.
#[derive(Debug, Clone, Copy)]
enum Order {
    /// Both sides are closed after a few bytes more.
    Cut,
    /// The agent's side is closed; what it had sent reaches the collector after so long.
    Late(Duration),
}

/// A proxy. Dropping it ends nothing: it ends with the runtime.
#[derive(Debug)]
pub struct Proxy {
    /// Where agents connect to.
    pub address: String,
    target: watch::Sender<String>,
    orders: broadcast::Sender<Order>,
}

impl Proxy {
    /// Starts listening. Connections are refused until there is a target.
    pub async fn start(mut random: Random) -> Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .context("failed to listen")?;
        let address = listener
            .local_addr()
            .context("failed to read a port")?
            .to_string();
        let (target, targets) = watch::channel(String::new());
        let (orders, _) = broadcast::channel(16);
        let for_connections = orders.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (target, orders) = (targets.borrow().clone(), for_connections.subscribe());
                tokio::spawn(connection(client, target, orders, random.split()));
            }
        });
        Ok(Proxy {
            address,
            target,
            orders,
        })
    }

    /// Where new connections lead.
    pub fn lead_to(&self, address: &str) {
        self.target.send_replace(address.to_string());
    }

    /// Cuts every connection in the middle of what it carries.
    pub fn cut(&self) {
        // An error means that there is no connection.
        let _ = self.orders.send(Order::Cut);
    }

    /// Closes every connection for its agent, and delivers what was on the way later.
    pub fn deliver_late(&self, delay: Duration) {
        let _ = self.orders.send(Order::Late(delay));
    }
}

/// Bytes of one piece.
const PIECE: usize = 16 << 10;

async fn connection(
    client: TcpStream,
    target: String,
    mut orders: broadcast::Receiver<Order>,
    mut random: Random,
) {
    let Ok(server) = TcpStream::connect(&target).await else {
        return;
    };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let limit = Arc::new(AtomicI64::new(i64::MAX));
    let (late, lateness) = watch::channel(Duration::ZERO);
    let mut up = tokio::spawn(upwards(
        from_client,
        to_server,
        Arc::clone(&limit),
        lateness,
    ));
    let mut down = tokio::spawn(downwards(from_server, to_client));
    let order = tokio::select! {
        order = orders.recv() => order.ok(),
        _ = &mut up => None,
        _ = &mut down => None,
    };
    match order {
        Some(Order::Cut) => {
            limit.store(random.below(2 * PIECE as u64) as i64, Ordering::Relaxed);
            // Whoever sends nothing is cut too.
            let _ = tokio::time::timeout(Duration::from_millis(20), &mut up).await;
        }
        Some(Order::Late(delay)) => {
            down.abort();
            late.send_replace(delay);
            let _ = up.await;
            return;
        }
        None => {}
    }
    up.abort();
    down.abort();
}

async fn downwards(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let mut piece = vec![0; PIECE];
    while let Ok(bytes @ 1..) = from.read(&mut piece).await {
        if to.write_all(&piece[..bytes]).await.is_err() {
            return;
        }
    }
}

async fn upwards(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    limit: Arc<AtomicI64>,
    mut late: watch::Receiver<Duration>,
) {
    let mut piece = vec![0; PIECE];
    loop {
        let read = tokio::select! {
            read = from.read(&mut piece) => read,
            _ = late.changed() => break,
        };
        let Ok(bytes @ 1..) = read else { return };
        let before = limit.fetch_sub(bytes as i64, Ordering::Relaxed);
        let allowed = usize::try_from(before).unwrap_or(0).min(bytes);
        if to.write_all(&piece[..allowed]).await.is_err() || allowed < bytes {
            return;
        }
    }
    let mut held = Vec::new();
    while let Ok(bytes @ 1..) = from.try_read(&mut piece) {
        held.extend_from_slice(&piece[..bytes]);
    }
    // The agent's connection ends here; the collector's goes on.
    drop(from);
    let delay = *late.borrow();
    tokio::time::sleep(delay).await;
    if to.write_all(&held).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that keeps what it is sent, connection by connection.
    async fn sink() -> (String, tokio::sync::mpsc::UnboundedReceiver<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sender, received) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let sender = sender.clone();
                tokio::spawn(async move {
                    let mut bytes = Vec::new();
                    // A connection that is reset has given what it gave.
                    let _ = stream.read_to_end(&mut bytes).await;
                    let _ = sender.send(bytes);
                });
            }
        });
        (address, received)
    }

    #[tokio::test]
    async fn a_cut_ends_both_sides_and_keeps_the_order() {
        let (address, mut received) = sink().await;
        let proxy = Proxy::start(Random::new(7)).await.unwrap();
        proxy.lead_to(&address);
        let mut client = TcpStream::connect(&proxy.address).await.unwrap();
        client.write_all(&[1; 1000]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        proxy.cut();
        let mut rest = Vec::new();
        let _ = client.read_to_end(&mut rest).await;
        let got = received.recv().await.unwrap();
        assert_eq!(got, vec![1; 1000]);
    }

    #[tokio::test]
    async fn what_is_late_arrives_after_the_agent_has_gone() {
        let (address, mut received) = sink().await;
        let proxy = Proxy::start(Random::new(7)).await.unwrap();
        proxy.lead_to(&address);
        let mut client = TcpStream::connect(&proxy.address).await.unwrap();
        client.write_all(b"first").await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        proxy.deliver_late(Duration::from_millis(100));
        let mut rest = Vec::new();
        let _ = client.read_to_end(&mut rest).await;
        assert!(
            received.try_recv().is_err(),
            "the server's side is still open"
        );
        assert_eq!(received.recv().await.unwrap(), b"first");
    }
}
