//! Charge requests, with their options and deadlines, and the error of a refused charge.
//!
//! # Design
//! [`Group::request`] begins a request. The options of a request are independent of one another.
//! `now`, `wait` or `.await` then makes the charge.

use super::{Bytes, Charge, Group, Kind, Limit, made_or_here};
use crate::groups::memory_groups::Grouped;
use crate::percpu::per_cpu_data::Source;
use crate::process::PROCESS;
use core::fmt;
use core::pin::Pin;
use core::task::{Context, Poll};
use core::time::Duration;
use neap_base::{Linux, Platform};
use neap_groups::{FOREVER, OnLimit, Payer, Refusal};

impl Group {
    /// Begins a request to charge `bytes` bytes. Nothing is charged yet.
    ///
    /// ```
    /// use core::time::Duration;
    /// use neap::groups::{Bound, ChargeError, Group};
    ///
    /// let pool = Group::create("requests")?;
    /// pool.set(Bound::Max, 1 << 20)?;
    /// let all = pool.request(1 << 20).now()?;
    /// assert!(matches!(pool.request(1).now(), Err(ChargeError::Limit(_))));
    /// let soon = Duration::from_millis(1);
    /// assert!(matches!(pool.request(1).deadline(soon).wait(), Err(ChargeError::Timeout(_))));
    /// assert!(matches!(pool.request(2 << 20).wait(), Err(ChargeError::TooLarge(_))));
    /// let more = pool.request(4096).node(0).overcharge().now()?;
    /// drop(all);
    /// let waited = pool.request(4096).wait()?;
    /// # drop((more, waited));
    /// pool.delete()?;
    /// assert_eq!(pool.request(1).now().unwrap_err(), ChargeError::Deleted);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub const fn request(self, bytes: u64) -> ChargeRequest {
        ChargeRequest { group: self, bytes, node: 0, inline: false, overcharge: false, time: None }
    }
}

/// A charge that is not made yet, with its options. [`Group::request`] returns it.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is charged before now(), wait() or .await"]
pub struct ChargeRequest {
    group: Group,
    bytes: u64,
    node: usize,
    inline: bool,
    overcharge: bool,
    time: Option<Duration>,
}

impl ChargeRequest {
    /// Sets the NUMA node of the memory. The default is 0.
    pub const fn node(self, node: usize) -> Self {
        ChargeRequest { node, ..self }
    }

    /// Allows the charge to call shrinkers in this thread, which must hold no lock that shrinkers
    /// take.
    ///
    /// The charge calls only shrinkers that [allow](crate::reclaim::Builder::inline) it. A future
    /// calls no shrinker.
    pub const fn inline(self) -> Self {
        ChargeRequest { inline: true, ..self }
    }

    /// Lets the charge exceed limits. Without this option, the charge is refused there. The group
    /// at its limit counts an [`Event::Overcharged`](super::Event::Overcharged).
    pub const fn overcharge(self) -> Self {
        ChargeRequest { overcharge: true, ..self }
    }

    /// Sets how long `wait` and `.await` may take, from their call on. The default is no limit.
    pub const fn deadline(self, time: Duration) -> Self {
        ChargeRequest { time: Some(time), ..self }
    }

    fn payer(&self) -> Payer {
        self.group.0.payer(Kind::ByHand, self.node)
    }

    fn grouped(&self) -> Result<Grouped<'static, Linux>, ChargeError> {
        made_or_here(self.group).map_err(|_| ChargeError::Deleted)
    }

    fn charged(&self) -> Charge {
        Charge { payer: self.payer(), bytes: self.bytes }
    }

    /// Returns the time of the deadline, in nanoseconds of the platform's clock.
    fn end(&self, platform: &Linux) -> u64 {
        let time = self.time.map_or(FOREVER, |time| u64::try_from(time.as_nanos()).unwrap_or(FOREVER));
        platform.precise().saturating_add(time)
    }

    /// Charges the bytes, or refuses without waiting for other charges to end.
    ///
    /// A charge beyond a `max` is refused only after reclaim, which takes 200 ms at most. A charge
    /// above a `high` takes up to two seconds.
    ///
    /// # Errors
    /// See [`ChargeError`]. Nothing is charged then. With [`ChargeRequest::overcharge`] the charge
    /// fails only if the group is deleted, or if its usage would exceed `i64::MAX` bytes.
    #[inline]
    pub fn now(self) -> Result<Charge, ChargeError> {
        // The stock comes first, with all arguments in registers. Arguments in memory would stall
        // the CPU, which does not forward a store to a wider load.
        if PROCESS.take_stocked(self.payer(), self.bytes) {
            return Ok(self.charged());
        }
        self.now_slowly()
    }

    #[cold]
    #[inline(never)]
    fn now_slowly(self) -> Result<Charge, ChargeError> {
        let grouped = self.grouped()?;
        let grouped = if self.inline { grouped.inline() } else { grouped };
        let on_limit = if self.overcharge { OnLimit::Overcharge } else { OnLimit::Refuse };
        grouped.charge(self.payer(), self.bytes, on_limit).map_err(ChargeError::of)?;
        Ok(self.charged())
    }

    /// Charges the bytes, and waits for room at a limit.
    ///
    /// neap admits the oldest waiter first. Small requests may pass it a few times. The caller must
    /// hold nothing that other threads need to make room.
    ///
    /// # Errors
    /// See [`ChargeError`]. Nothing is charged then.
    pub fn wait(self) -> Result<Charge, ChargeError> {
        if self.overcharge {
            return self.now();
        }
        let grouped = self.grouped()?;
        let end = self.end(grouped.platform());
        if let Some(reclaiming) = PROCESS.reclaiming_if_made().filter(|_| self.inline) {
            reclaiming.make_room_inline(self.group.0, self.bytes, end);
        }
        let refused = |refusal| ChargeError::of_waiter(refusal, grouped.platform().precise() >= end);
        grouped.charge_or_wait(self.payer(), self.bytes, end).map_err(refused)?;
        Ok(self.charged())
    }
}

/// Makes [`ChargeRequest::wait`] a future. The first poll makes the request, and dropping the
/// future withdraws it. No poll waits or calls a shrinker.
impl IntoFuture for ChargeRequest {
    type Output = Result<Charge, ChargeError>;
    type IntoFuture = ChargeAsync;

    fn into_future(self) -> ChargeAsync {
        let waiting = self.grouped().ok().map(|grouped| {
            let end = self.end(grouped.platform());
            let waiting = grouped.charge_async(self.payer(), self.bytes, end);
            (if self.overcharge { waiting.overcharge() } else { waiting }, end)
        });
        ChargeAsync { request: self, waiting }
    }
}

/// A charge that waits for room, as a future.
///
/// With [`ChargeRequest::overcharge`] the future waits only while the charge is delayed above a
/// `high`.
///
/// neap's thread wakes the task of the future. Where neap can have no thread, a thread that
/// [ticks](crate::mm::Mm::tick) does.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct ChargeAsync {
    request: ChargeRequest,
    /// The waiting charge, and its deadline in nanoseconds of the platform's clock. `None`: there
    /// is no group.
    waiting: Option<(neap_groups::ChargeAsync<'static, Source<'static, Linux>>, u64)>,
}

impl Future for ChargeAsync {
    type Output = Result<Charge, ChargeError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let request = self.request;
        let Some((waiting, end)) = &mut self.waiting else { return Poll::Ready(Err(ChargeError::Deleted)) };
        let answer = core::task::ready!(Pin::new(waiting).poll(context));
        let is_over = || request.grouped().is_ok_and(|grouped| grouped.platform().precise() >= *end);
        Poll::Ready(answer.map(|_| request.charged()).map_err(|refusal| ChargeError::of_waiter(refusal, is_over())))
    }
}

/// Reason for a refused charge. Nothing was charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ChargeError {
    /// A limit was reached, and reclaim freed too little.
    Limit(Limit),
    /// A limit left no room until the deadline.
    Timeout(Limit),
    /// The request exceeds the limit itself, so no reclaim or wait can satisfy it.
    TooLarge(Limit),
    /// The group is deleted.
    Deleted,
}

impl ChargeError {
    fn of(refusal: Refusal) -> ChargeError {
        match refusal {
            Refusal::Limit(limit) if limit.need > limit.max => ChargeError::TooLarge(limit),
            Refusal::Limit(limit) => ChargeError::Limit(limit),
            Refusal::Gone => ChargeError::Deleted,
        }
    }

    /// The error of a charge that waited. `is_late` says whether its deadline has passed.
    fn of_waiter(refusal: Refusal, is_late: bool) -> ChargeError {
        match ChargeError::of(refusal) {
            ChargeError::Limit(limit) if is_late => ChargeError::Timeout(limit),
            error => error,
        }
    }

    /// Returns the limit that the charge reached. Returns `None` if the group is deleted.
    pub fn limit(&self) -> Option<&Limit> {
        match self {
            ChargeError::Limit(limit) | ChargeError::Timeout(limit) | ChargeError::TooLarge(limit) => Some(limit),
            ChargeError::Deleted => None,
        }
    }

    /// Returns up to three groups that hold most of the memory below the limit, with their bytes,
    /// largest first.
    pub fn holders(&self) -> impl Iterator<Item = (Group, u64)> {
        let holders = self.limit().map(|limit| limit.holders);
        holders.into_iter().flatten().flatten().map(|(id, bytes)| (Group(id), bytes))
    }
}

/// Names the group, its usage and limit, the requested bytes, and the groups that hold the memory.
impl fmt::Display for ChargeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(limit) = self.limit() else { return f.write_str("the group is deleted") };
        let &Limit { group, max, charged, need, .. } = limit;
        let [charged, max, need] = [charged, max, need].map(Bytes);
        write!(f, "{} has {charged} of {max} and is asked for {need} more", Group(group))?;
        match self {
            ChargeError::Timeout(_) => f.write_str(", until the deadline")?,
            ChargeError::TooLarge(_) => f.write_str(", which is more than its limit")?,
            _ => {}
        }
        for (separator, (holder, bytes)) in ["; held by ", ", ", ", "].into_iter().zip(self.holders()) {
            match holder.0 == group {
                true => write!(f, "{separator}itself ({})", Bytes(bytes))?,
                false => write!(f, "{separator}{holder} ({})", Bytes(bytes))?,
            }
        }
        Ok(())
    }
}

impl core::error::Error for ChargeError {}
