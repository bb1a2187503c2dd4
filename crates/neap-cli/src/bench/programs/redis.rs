//! redis: stores a million keys, reads them back and flushes them. Measures the processor time of
//! the server's requests, and the memory kept.
//!
//! The benchmark speaks the protocol itself over TCP, many requests at a time, so that the server's
//! processor time is spent on requests and not on waiting. The replies count as the program's
//! output, which must be equal under all allocators.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::scratch::Scratch;
use super::{LIMIT, Method, Output, Program, tool};
use crate::bench::cgroup::Cgroup;
use crate::process::{Finished, Process, rss_kib, threads_cpu_ns};
use crate::variant::Variant;
use crate::work::Outcome;

/// Requests sent before their replies are read.
const PIPELINE: usize = 64;
const VALUE_BYTES: usize = 200;

pub(super) fn program() -> Program {
    Program { name: "redis", needs: &["redis-server"], prepare: |_| Ok(()), run: Method::Own(run) }
}

/// A server that keeps nothing on disk, and a connection to it.
pub(super) struct Server {
    process: Process,
    pub(super) client: Client,
    malloc_from: String,
}

impl Server {
    /// Starts redis-server on a variant, with more options, in a memory group if there is one.
    pub(super) fn start(
        scratch: &Scratch,
        variant: &Variant,
        options: &[&str],
        group: Option<&Cgroup>,
    ) -> Result<Server> {
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let mut command = tool(scratch, "redis-server")?;
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
        command.args(["--daemonize", "no", "--loglevel", "warning"]).args(options);
        variant.apply(&mut command);
        command.stderr(scratch.errors()?);
        group.map_or(Ok(()), |group| group.enter(&mut command))?;
        let process = Process::start(command, LIMIT)?;
        let client = Client::connect(port)?;
        let malloc_from = mapped_malloc(process.id(), variant)?;
        Ok(Server { process, client, malloc_from })
    }

    /// Waits for a server that has ended itself, or was ended.
    pub(super) fn end(self) -> Result<Finished> {
        self.process.wait()
    }

    /// Shuts the server down. Returns its whole cost, with the replies as output.
    pub(super) fn stop(mut self) -> Result<Outcome> {
        self.client.send(&[vec!["SHUTDOWN".to_string(), "NOSAVE".to_string()]])?;
        let finished = self.process.wait()?;
        Ok(Outcome { malloc_from: self.malloc_from, ..self.client.replies.outcome(&finished) })
    }
}

fn run(scratch: &Scratch, variant: &Variant) -> Result<Outcome> {
    let keys = scratch.amount(1_000_000);
    let mut server = Server::start(scratch, variant, &[], None)?;
    let (id, client) = (server.process.id(), &mut server.client);
    let before = threads_cpu_ns(id)?;
    let started = Instant::now();
    let value = "v".repeat(VALUE_BYTES);
    client.pipelined(keys, |key| vec!["SET".to_string(), format!("key:{key}"), value.clone()], Reply::Line)?;
    client.pipelined(keys, |key| vec!["GET".to_string(), format!("key:{key}")], Reply::Bulk)?;
    let wall = started.elapsed();
    let cpu = threads_cpu_ns(id)? - before;
    let full = rss_kib(id)?;
    client.pipelined(1, |_| vec!["FLUSHALL".to_string()], Reply::Line)?;
    thread::sleep(Duration::from_secs(2));
    let kept = rss_kib(id)?;
    Ok(Outcome {
        operations: 2 * keys as u64,
        wall_ns: wall.as_nanos() as u64,
        cpu_ns: cpu,
        rss_kib: vec![full, kept],
        ..server.stop()?
    })
}

/// Returns the library whose malloc the server uses: the preloaded one, or one that the server was
/// linked with (builds of redis bring jemalloc), or the C library.
fn mapped_malloc(server: u32, variant: &Variant) -> Result<String> {
    let maps = std::fs::read_to_string(format!("/proc/{server}/maps"))?;
    let mapped = |wanted: &str| maps.split_whitespace().find(|path| path.starts_with('/') && path.contains(wanted));
    if let Some(library) = &variant.library {
        let library = library.to_string_lossy();
        return mapped(&library).map(str::to_string).with_context(|| format!("redis-server did not load {library}"));
    }
    Ok(mapped("malloc").or_else(|| mapped("libc.so")).unwrap_or("unknown").to_string())
}

/// The form of a reply.
#[derive(Clone, Copy)]
pub(super) enum Reply {
    /// One line.
    Line,
    /// A line with a length, then that many bytes and a line end.
    Bulk,
}

pub(super) struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
    replies: Output,
}

impl Client {
    /// Connects as soon as the server listens.
    fn connect(port: u16) -> Result<Client> {
        let patience = Instant::now() + Duration::from_secs(20);
        loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
                    return Ok(Client { stream, buffer: Vec::new(), replies: Output::default() });
                }
                Err(error) if Instant::now() > patience => return Err(error).context("redis-server does not listen"),
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Sends `count` requests, some at a time, and reads a reply to each.
    pub(super) fn pipelined(
        &mut self,
        count: usize,
        request: impl Fn(usize) -> Vec<String>,
        reply: Reply,
    ) -> Result<()> {
        for first in (0..count).step_by(PIPELINE) {
            let requests: Vec<Vec<String>> = (first..count.min(first + PIPELINE)).map(&request).collect();
            self.send(&requests)?;
            self.receive(requests.len(), reply)?;
        }
        Ok(())
    }

    fn send(&mut self, requests: &[Vec<String>]) -> Result<()> {
        let mut text = String::new();
        for words in requests {
            text += &format!("*{}\r\n", words.len());
            for word in words {
                text += &format!("${}\r\n{word}\r\n", word.len());
            }
        }
        self.stream.write_all(text.as_bytes()).context("redis-server does not take requests")
    }

    fn receive(&mut self, count: usize, reply: Reply) -> Result<()> {
        let mut end = 0;
        for _ in 0..count {
            loop {
                match reply_end(&self.buffer[end..], reply)? {
                    Some(length) => {
                        end += length;
                        break;
                    }
                    None => self.fill()?,
                }
            }
        }
        self.replies.add(&self.buffer[..end]);
        self.buffer.drain(..end);
        Ok(())
    }

    fn fill(&mut self) -> Result<()> {
        let mut bytes = [0; 64 * 1024];
        match self.stream.read(&mut bytes).context("redis-server does not answer")? {
            0 => bail!("redis-server closed the connection"),
            length => self.buffer.extend_from_slice(&bytes[..length]),
        }
        Ok(())
    }
}

/// Length of the reply at the start of `text`, or nothing while it is incomplete.
fn reply_end(text: &[u8], reply: Reply) -> Result<Option<usize>> {
    let Some(line) = text.windows(2).position(|pair| pair == b"\r\n") else { return Ok(None) };
    if text[0] == b'-' {
        bail!("redis-server: {}", String::from_utf8_lossy(&text[..line]));
    }
    let after_line = line + 2;
    match reply {
        Reply::Line => Ok(Some(after_line)),
        Reply::Bulk => {
            let stated = std::str::from_utf8(&text[1..line])?;
            let length: usize = stated.parse().with_context(|| format!("redis-server gave no value: ${stated}"))?;
            let end = after_line + length + 2;
            Ok((text.len() >= end).then_some(end))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_end_where_the_protocol_says() {
        assert_eq!(reply_end(b"+OK\r\n+O", Reply::Line).unwrap(), Some(5));
        assert_eq!(reply_end(b"+OK\r", Reply::Line).unwrap(), None);
        assert_eq!(reply_end(b"$3\r\na\r\n\r\n$", Reply::Bulk).unwrap(), Some(9));
        assert_eq!(reply_end(b"$3\r\nab", Reply::Bulk).unwrap(), None);
        assert!(reply_end(b"-OOM\r\n", Reply::Line).unwrap_err().to_string().contains("-OOM"));
        assert!(reply_end(b"$-1\r\n", Reply::Bulk).is_err());
    }
}
