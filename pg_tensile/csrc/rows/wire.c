/*
 * wire.c: frames on a Unix stream socket (docs/internals.md, "Frames").
 *
 * Writing: head, header and the table of lengths are composed in the writer's
 * own memory; an iovec refers to the buffers, which are never copied.
 * Reading: data goes into one growing block that always starts with a frame,
 * so that a frame is used where it was received.  A stream that violates the
 * format is given up, never resynchronised.
 *
 * MSG_DONTWAIT makes every call non-blocking, whatever the mode of the socket,
 * which may be shared with a child.
 *
 * Copyright (c) 2026, the pg_tensile developers.  PostgreSQL License.
 */
#include "postgres.h"

#include <errno.h>
#include <limits.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "storage/latch.h"
#include "utils/memutils.h"

#include "processes/wait.h"
#include "rows/wire.h"

#ifndef IOV_MAX
#define IOV_MAX 1024
#endif

#define FRAME_MAGIC "PGT1"
#define INITIAL_READ (64 * 1024)
#define PAD(length) ((Size) TYPEALIGN(8, (length)) - (Size) (length))

typedef struct FrameHead
{
	char		magic[4];
	uint16		type;
	uint16		rank;
	int64		job;
	uint32		header_length;
	uint32		nbuffers;
	uint64		payload_length;
} FrameHead;

StaticAssertDecl(sizeof(FrameHead) == 32, "a frame's head has 32 bytes");

#ifdef WORDS_BIGENDIAN
#error "frames are little-endian; this port needs byte swaps"
#endif

static const char padding[8] = {0};
static const char spaces[8] = {' ', ' ', ' ', ' ', ' ', ' ', ' ', ' '};

static void *
allocate(MemoryContext context, void *old, Size size)
{
	return old ? repalloc(old, size) : MemoryContextAlloc(context, size);
}

/* ---- writing ---- */

void
frame_writer_init(FrameWriter *writer, MemoryContext context)
{
	memset(writer, 0, sizeof(*writer));
	writer->context = context;
}

/* The bytes of the frame's payload; 54000 if the format cannot carry them. */
static uint64
checked_payload(Size header_length, const WireBuffer *buffers, int nbuffers)
{
	uint64		payload = (uint64) nbuffers * sizeof(uint64);

	for (int i = 0; i < nbuffers; i++)
		payload += TYPEALIGN(8, buffers[i].length);
	if (header_length > FRAME_MAX_HEADER - 8 || nbuffers > FRAME_MAX_BUFFERS ||
		payload > FRAME_MAX_PAYLOAD)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("the data does not fit into a message to the child process"),
				 errdetail("The message would have %zu bytes of header, %d buffers and "
						   UINT64_FORMAT " bytes of data.", header_length, nbuffers, payload),
				 errhint("A single row may have at most 1 GB and a message at most 16 MB "
						 "of distinct strings: select fewer or shorter columns.")));
	return payload;
}

static void
writer_add(FrameWriter *writer, const void *data, Size length)
{
	if (length > 0)
	{
		writer->parts[writer->nparts].iov_base = (void *) data;
		writer->parts[writer->nparts].iov_len = length;
		writer->nparts++;
	}
}

void
frame_writer_begin(FrameWriter *writer, FrameType type, int64 job, const char *header,
				   Size header_length, const WireBuffer *buffers, int nbuffers)
{
	Size		header_pad = PAD(header_length);
	Size		head_length = sizeof(FrameHead) + header_length + header_pad +
		nbuffers * sizeof(uint64);
	FrameHead	head = {.type = type,.rank = 0,.job = job,.nbuffers = nbuffers};
	char	   *to;

	head.payload_length = checked_payload(header_length, buffers, nbuffers);
	head.header_length = header_length + header_pad;
	memcpy(head.magic, FRAME_MAGIC, sizeof(head.magic));

	if (head_length > writer->head_capacity)
	{
		writer->head = allocate(writer->context, writer->head, head_length);
		writer->head_capacity = head_length;
	}
	if (2 * nbuffers + 1 > writer->capacity)
	{
		writer->capacity = 2 * nbuffers + 1;
		writer->parts = allocate(writer->context, writer->parts,
								 writer->capacity * sizeof(struct iovec));
	}

	to = writer->head;
	memcpy(to, &head, sizeof(head));
	to += sizeof(head);
	if (header_length > 0)
		memcpy(to, header, header_length);
	to += header_length;
	memcpy(to, spaces, header_pad);
	to += header_pad;

	writer->nparts = writer->next = 0;
	writer_add(writer, writer->head, head_length);
	for (int i = 0; i < nbuffers; i++)
	{
		uint64		length = buffers[i].length;

		memcpy(to, &length, sizeof(length));
		to += sizeof(length);
		writer_add(writer, buffers[i].data, length);
		writer_add(writer, padding, PAD(length));
	}
}

IoResult
frame_writer_some(FrameWriter *writer, int fd)
{
	while (writer->next < writer->nparts)
	{
		struct msghdr message = {0};
		ssize_t		sent;

		message.msg_iov = writer->parts + writer->next;
		message.msg_iovlen = Min(writer->nparts - writer->next, IOV_MAX);
		sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (sent < 0)
		{
			if (errno == EINTR)
				continue;
			if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
				return IO_AGAIN;
			return IO_CLOSED;
		}
		while (writer->next < writer->nparts && sent >= writer->parts[writer->next].iov_len)
			sent -= writer->parts[writer->next++].iov_len;
		if (sent > 0)
		{
			struct iovec *part = &writer->parts[writer->next];

			part->iov_base = (char *) part->iov_base + sent;
			part->iov_len -= sent;
		}
	}
	return IO_DONE;
}

void
wire_send(FrameWriter *writer, int fd, const char *peer, long timeout_ms,
		  FrameType type, int64 job, const char *header, Size header_length,
		  const WireBuffer *buffers, int nbuffers)
{
	IoResult	result;

	frame_writer_begin(writer, type, job, header, header_length, buffers, nbuffers);
	while ((result = frame_writer_some(writer, fd)) == IO_AGAIN)
		if (tensile_wait_socket(fd, WL_SOCKET_WRITEABLE, timeout_ms) & WL_TIMEOUT)
			ereport(ERROR,
					(errcode(ERRCODE_CONNECTION_FAILURE),
					 errmsg("%s took no data for %ld s", peer, timeout_ms / 1000)));
	if (result == IO_CLOSED)
		ereport(ERROR,
				(errcode(ERRCODE_CONNECTION_FAILURE),
				 errmsg("%s went away", peer),
				 errdetail("Writing to it failed: %m.")));
}

/* ---- reading ---- */

void
frame_reader_init(FrameReader *reader, Size max_payload, MemoryContext context)
{
	memset(reader, 0, sizeof(*reader));
	reader->max_payload = max_payload;
	reader->context = context;
	reader->capacity = INITIAL_READ;
	reader->data = MemoryContextAlloc(context, INITIAL_READ);
}

void
frame_reader_reset(FrameReader *reader)
{
	reader->used = reader->taken = 0;
}

bool
frame_reader_has_some(const FrameReader *reader)
{
	return reader->used > reader->taken;
}

/* The bytes of the frame at the start of the block, as far as known; 0 if bad. */
static Size
frame_size(const FrameReader *reader)
{
	FrameHead	head;

	if (reader->used < sizeof(head))
		return sizeof(head);
	memcpy(&head, reader->data, sizeof(head));
	if (memcmp(head.magic, FRAME_MAGIC, sizeof(head.magic)) != 0 ||
		head.header_length > FRAME_MAX_HEADER || head.header_length % 8 != 0 ||
		head.nbuffers > FRAME_MAX_BUFFERS || head.payload_length > reader->max_payload ||
		head.payload_length < (uint64) head.nbuffers * sizeof(uint64))
		return 0;
	return sizeof(head) + head.header_length + head.payload_length;
}

/* Parses the complete frame at the start of the block; false: malformed. */
static bool
parse_frame(FrameReader *reader, Size size)
{
	FrameHead	head;
	const char *table;
	Size		offset;

	memcpy(&head, reader->data, sizeof(head));
	if (head.nbuffers > reader->buffers_capacity)
	{
		reader->buffers = allocate(reader->context, reader->buffers,
								   head.nbuffers * sizeof(WireBuffer));
		reader->buffers_capacity = head.nbuffers;
	}
	table = reader->data + sizeof(head) + head.header_length;
	offset = sizeof(head) + head.header_length + head.nbuffers * sizeof(uint64);
	for (uint32 i = 0; i < head.nbuffers; i++)
	{
		uint64		length;

		memcpy(&length, table + i * sizeof(uint64), sizeof(length));
		if (length > size - offset || PAD(length) > size - offset - length)
			return false;
		reader->buffers[i].data = reader->data + offset;
		reader->buffers[i].length = length;
		offset += length + PAD(length);
	}
	reader->frame = (Frame) {
		.type = head.type,.job = head.job,
		.header = reader->data + sizeof(head),.header_length = head.header_length,
		.nbuffers = head.nbuffers,.buffers = reader->buffers
	};
	return offset == size;
}

IoResult
frame_reader_next(FrameReader *reader, int fd, const Frame **frame)
{
	if (reader->taken > 0)
	{
		memmove(reader->data, reader->data + reader->taken, reader->used - reader->taken);
		reader->used -= reader->taken;
		reader->taken = 0;
	}
	for (;;)
	{
		Size		size = frame_size(reader);
		ssize_t		received;

		if (size == 0)
			return IO_MALFORMED;
		if (reader->used >= size)
		{
			if (!parse_frame(reader, size))
				return IO_MALFORMED;
			reader->taken = size;
			*frame = &reader->frame;
			return IO_DONE;
		}
		if (size > reader->capacity)
		{
			reader->data = repalloc_huge(reader->data, size);
			reader->capacity = size;
		}
		received = recv(fd, reader->data + reader->used, reader->capacity - reader->used,
						MSG_DONTWAIT);
		if (received > 0)
			reader->used += received;
		else if (received == 0)
			return IO_CLOSED;
		else if (errno == EAGAIN || errno == EWOULDBLOCK)
			return IO_AGAIN;
		else if (errno != EINTR)
			return IO_CLOSED;
	}
}
