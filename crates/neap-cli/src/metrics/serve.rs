//! The server of `neap metrics --listen`: one request for each connection.
//!
//! # Design
//! Each connection has a thread, since a client may be slow to send its request or to take the
//! answer. There are limits on the number of connections, on the bytes of a request, and on the
//! time for the request and for the answer. A lock lets one connection at a time make a reading.
//! SIGTERM and SIGINT end the command.

use core::time::Duration;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};

use super::families::Format;
use super::reading::{Reader, Scrape};
use crate::look::foreign::escaped;
use crate::signals;

/// Most connections at a time. The server closes further ones at once.
const MOST_CONNECTIONS: usize = 64;
/// Most bytes of a request, and most headers.
const LONGEST: usize = 8 << 10;
const MOST_HEADERS: usize = 64;
/// Time for a client to send its request, and again to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause after a failure to accept a connection, for example for lack of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);
/// Bytes of an answer that the server writes before it checks the time.
const PIECE: usize = 64 << 10;

const PATH: &str = "/metrics";

/// An answer.
struct HttpAnswer {
    status: &'static str,
    content_type: &'static str,
    body: String,
}

fn plain(status: &'static str, text: &str) -> HttpAnswer {
    HttpAnswer { status, content_type: "text/plain; charset=utf-8", body: format!("{text}\n") }
}

/// Serves the metrics until a signal ends the command.
pub(super) fn main(address: &str, reader: Reader) -> Result<ExitCode> {
    let unusable = || format!("cannot listen on {address}");
    let listener = TcpListener::bind(address).with_context(unusable)?;
    let local = listener.local_addr().with_context(unusable)?;
    if !local.ip().is_loopback() {
        eprintln!(
            "neap: warning: {local} can be reached from other machines: names of processes and groups, and their \
             memory, are shown to every client without a password"
        );
    }
    signals::ignore_closed_pipes();
    eprintln!("neap: metrics at http://{local}{PATH}");
    let (reader, open) = (Arc::new(Mutex::new(reader)), Arc::new(AtomicUsize::new(0)));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(PAUSE);
            continue;
        };
        // Relaxed: only this thread adds to the number.
        if open.load(Ordering::Relaxed) >= MOST_CONNECTIONS {
            continue;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let (reader, count) = (Arc::clone(&reader), Arc::clone(&open));
        let serve = move || {
            let read = || reader.lock().unwrap_or_else(PoisonError::into_inner).read();
            // The client may be gone.
            let _ = serve_one(&stream, &read);
            count.fetch_sub(1, Ordering::Relaxed);
        };
        if std::thread::Builder::new().spawn(serve).is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn serve_one(mut stream: &TcpStream, read: &dyn Fn() -> Result<Scrape>) -> io::Result<()> {
    let end = Instant::now() + PATIENCE;
    let mut request = Vec::new();
    let (is_head, answer) = loop {
        if let Some(found) = parse(&request, read) {
            break found;
        }
        let mut piece = [0; 1024];
        stream.set_read_timeout(Some(rest(end)?))?;
        match stream.read(&mut piece)? {
            0 => return Ok(()),
            length => request.extend_from_slice(&piece[..length]),
        }
    };
    let HttpAnswer { status, content_type, body } = answer;
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let end = Instant::now() + PATIENCE;
    let body = if is_head { &[] } else { body.as_bytes() };
    for piece in [head.as_bytes()].into_iter().chain(body.chunks(PIECE)) {
        stream.set_write_timeout(Some(rest(end)?))?;
        stream.write_all(piece)?;
    }
    stream.shutdown(Shutdown::Write)
}

/// Returns the time until `end`, or the error `TimedOut` if it has passed.
fn rest(end: Instant) -> io::Result<Duration> {
    let rest = end.saturating_duration_since(Instant::now());
    if rest.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(rest) }
}

/// Parses a request. Returns whether the client wants the head of the answer alone, and the answer.
/// `None` while the request is incomplete.
fn parse(bytes: &[u8], read: &dyn Fn() -> Result<Scrape>) -> Option<(bool, HttpAnswer)> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(status) if status.is_complete() => {}
        Ok(_) if bytes.len() < LONGEST => return None,
        _ => return Some((false, plain("400 Bad Request", "the request is malformed or too long"))),
    }
    let method = request.method.unwrap_or_default();
    let path = request.path.unwrap_or_default().split('?').next();
    let answer = if path != Some(PATH) {
        plain("404 Not Found", "there is only /metrics")
    } else if !matches!(method, "GET" | "HEAD") {
        plain("405 Method Not Allowed", "there is only GET")
    } else {
        let accepts = |header: &httparse::Header<'_>| {
            header.name.eq_ignore_ascii_case("accept")
                && String::from_utf8_lossy(header.value).contains("openmetrics-text")
        };
        let format = if request.headers.iter().any(accepts) { Format::OpenMetrics } else { Format::Prometheus };
        match read() {
            Ok(reading) => {
                HttpAnswer { status: "200 OK", content_type: format.content_type(), body: reading.text(format) }
            }
            Err(error) => plain("500 Internal Server Error", &escaped(format!("{error:#}").as_bytes())),
        }
    };
    Some((method == "HEAD", answer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn status(request: &str) -> Option<&'static str> {
        let read = || bail!("\u{9b}");
        parse(request.as_bytes(), &read).map(|(_, answer)| {
            assert!(!answer.body.contains('\u{9b}'));
            answer.status
        })
    }

    #[test]
    fn requests_are_whole_refused_or_not_whole_yet() {
        for (request, expected) in [
            ("", None),
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n", None),
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", Some("500 Internal Server Error")),
            ("GET /metrics?a=/b HTTP/1.0\r\n\r\n", Some("500 Internal Server Error")),
            ("GET /metricsx HTTP/1.0\r\n\r\n", Some("404 Not Found")),
            ("PUT /metrics HTTP/1.0\r\n\r\n", Some("405 Method Not Allowed")),
            ("\u{16}\u{3}\u{1}", Some("400 Bad Request")),
        ] {
            assert_eq!(status(request), expected, "{request}");
        }
        let long = |bytes: usize| format!("GET /metrics HTTP/1.0\r\nA: {}", "a".repeat(bytes));
        assert_eq!([status(&long(100)), status(&long(LONGEST))], [None, Some("400 Bad Request")]);
        let many = format!("GET /metrics HTTP/1.0\r\n{}\r\n", "A: b\r\n".repeat(MOST_HEADERS + 1));
        assert_eq!(status(&many), Some("400 Bad Request"));
    }
}
