package vmem

// mapNoReserve is nothing on FreeBSD: its memory is never reserved ahead.
const mapNoReserve = 0
